"""How many threads compute: spin on all cores while that pays, give one up when steps double, ask again later.

llama.cpp's threads spin at barriers between operations. On idle cores that is the fastest way; when another process takes
a core, every barrier waits for a thread that is not running and a step can take fifty times as long. So the governor
compares: it tries a neighbouring number of threads for a few steps and keeps whichever was faster. A doubled step time
asks at once for fewer. While it computes with fewer than all, or steps take longer than they did at their best, it asks
after a pause that doubles each time the answer is no; on calm cores it asks once and then nothing more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from types import MappingProxyType
from typing import Final

MAX_TOKENS: Final = 64
"""Larger steps are prefill; their times say little about decoding."""


@dataclass(frozen=True, slots=True)
class Rules:
    """`trial_steps`: steps a number of threads is tried for. `slow_steps`: doubled steps in a row that ask for fewer.

    `suspicious`: usual step time over the best that makes a question worthwhile; the best grows by `best_forgets` with each
    step, since steps get longer as answers do. `first_pause_s`, `last_pause_s`: the pauses between questions.
    """

    trial_steps: int = 4
    slow_steps: int = 3
    doubled: float = 2.0
    collapsed: float = 8.0
    suspicious: float = 1.3
    best_forgets: float = 1.002
    first_pause_s: float = 1.0
    last_pause_s: float = 60.0
    keep_more_below: float = 0.92
    keep_fewer_below: float = 1.0


DEFAULT_RULES: Final = Rules()


@dataclass(frozen=True, slots=True)
class Trial:
    """Threads on trial; `ratios`: step times so far over the time such steps took before."""

    threads: int
    ratios: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Governor:
    """State of the governor. `settled`: threads outside a trial.

    `usual_s`: step time by tokens of the step, a running mean; `best_s`: the least lately. `questioned`: fewer threads have
    been tried since it settled.
    """

    settled: int
    most: int
    usual_s: Mapping[int, float] = field(default_factory=dict)
    best_s: Mapping[int, float] = field(default_factory=dict)
    slow: tuple[float, ...] = ()
    trial: Trial | None = None
    ask_at_s: float = 0.0
    pause_s: float = 1.0
    ask_fewer_next: bool = False
    questioned: bool = False

    @property
    def threads(self) -> int:
        """Threads to compute the next step with."""
        return self.settled if self.trial is None else self.trial.threads


def candidates(most: int) -> list[int]:
    """Return the numbers of threads worth measuring before the first request: all, and one stride fewer."""
    return sorted({most, max(1, most - _stride(most))}, reverse=True)


def start(
    most: int, now_s: float, *, measured_s: Mapping[int, float] = MappingProxyType({}), rules: Rules = DEFAULT_RULES
) -> Governor:
    """Return a governor that starts with the fastest number of threads of `measured_s`, or with all."""
    settled = min(measured_s, key=lambda threads: (measured_s[threads], threads)) if measured_s else most
    return Governor(settled, most, ask_at_s=now_s + rules.first_pause_s, pause_s=rules.first_pause_s)


def observe(state: Governor, *, tokens: int, seconds: float, now_s: float, rules: Rules = DEFAULT_RULES) -> Governor:
    """Return the state after a step of `tokens` tokens that took `seconds` with `state.threads` threads."""
    if state.most <= 1 or not 0 < tokens <= MAX_TOKENS:
        return state
    usual = state.usual_s.get(tokens)
    if state.trial is not None:
        return state if usual is None else _tried(state, state.trial, seconds / usual, now_s, rules)
    if usual is None:
        return replace(
            state, usual_s={**state.usual_s, tokens: seconds}, best_s={**state.best_s, tokens: seconds}, slow=()
        )
    ratio = seconds / usual
    if ratio >= rules.doubled:
        return _slowed(state, ratio, rules)
    usual += (seconds - usual) / 8
    best = min(state.best_s.get(tokens, seconds) * rules.best_forgets, seconds)
    state = replace(state, usual_s={**state.usual_s, tokens: usual}, best_s={**state.best_s, tokens: best}, slow=())
    return _asked(state, now_s, suspicious=usual > rules.suspicious * best) if now_s >= state.ask_at_s else state


def _stride(threads: int) -> int:
    """Return by how many threads to go up or down: one on small machines, an eighth on large ones."""
    return max(1, threads // 8)


def _slowed(state: Governor, ratio: float, rules: Rules) -> Governor:
    slow = (*state.slow, ratio)
    if len(slow) < rules.slow_steps and ratio < rules.collapsed:
        return replace(state, slow=slow)
    # What is usual has changed: the trial is measured against how slow it is now.
    scale = median(slow)
    usual_s = {size: seconds * scale for size, seconds in state.usual_s.items()}
    if state.settled <= 1:
        return replace(state, usual_s=usual_s, slow=())
    fewer = max(1, state.settled - _stride(state.settled))
    return replace(state, usual_s=usual_s, slow=(), trial=Trial(fewer))


def _asked(state: Governor, now_s: float, *, suspicious: bool) -> Governor:
    suspicious = suspicious or not state.questioned
    fewer = state.settled > 1 and suspicious and (state.ask_fewer_next or state.settled >= state.most)
    if not fewer and state.settled >= state.most:
        return state
    step = _stride(state.settled)
    threads = max(1, state.settled - step) if fewer else min(state.most, state.settled + step)
    return replace(state, trial=Trial(threads), ask_fewer_next=not fewer, ask_at_s=now_s + state.pause_s)


def _tried(state: Governor, trial: Trial, ratio: float, now_s: float, rules: Rules) -> Governor:
    ratios = (*trial.ratios, ratio)
    hopeless = ratio >= rules.collapsed
    if len(ratios) < rules.trial_steps and not hopeless:
        return replace(state, trial=Trial(trial.threads, ratios))
    # The first step with another number of threads pays for starting or stopping them.
    result = median(ratios[1:]) if len(ratios) > 1 else ratios[0]
    limit = rules.keep_fewer_below if trial.threads < state.settled else rules.keep_more_below
    if result < limit and not hopeless:
        usual_s = {size: seconds * result for size, seconds in state.usual_s.items()}
        pause_s = rules.first_pause_s
        return Governor(
            settled=trial.threads,
            most=state.most,
            usual_s=usual_s,
            best_s=usual_s,
            ask_at_s=now_s + pause_s,
            pause_s=pause_s,
            ask_fewer_next=state.ask_fewer_next,
        )
    pause_s = min(rules.last_pause_s, state.pause_s * 2)
    questioned = state.questioned or trial.threads < state.settled
    return replace(state, trial=None, ask_at_s=now_s + pause_s, pause_s=pause_s, questioned=questioned)
