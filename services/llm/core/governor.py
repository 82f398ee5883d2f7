"""How many threads compute: spin on all cores while that pays, give one up when steps double, ask again later.

llama.cpp's threads spin at barriers between operations. On idle cores that is the fastest way; when another process takes
a core, every barrier waits for a thread that is not running, and a step can take many times as long. So the governor
compares: for a few steps it alternates between two numbers of threads, so that both meet the same conditions, and keeps the
faster. More threads than were best are the cheaper mistake, so fewer are kept only when clearly faster, and a trial of fewer
ends with the first pair of steps that says no. A doubled step time asks at once for fewer. While it computes with fewer than all, or steps take longer than at their
best, it asks after a pause that doubles each time the answer is no; on calm cores it asks once and then nothing more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

MAX_TOKENS: Final = 64
"""Larger steps are prefill; their times say little about decoding."""


@dataclass(frozen=True, slots=True)
class Rules:
    """`trial_steps`: steps of each kind in a trial. `slow_steps`: doubled steps in a row that ask for fewer.

    `suspicious`: usual step time over the best that makes a question worthwhile; the best grows by `best_forgets` with each
    step, since steps get longer as answers do. `first_pause_s`, `last_pause_s`: the pauses between questions.
    `keep_more_below`, `keep_fewer_below`: time of a step on trial over a settled one, below which the threads on trial stay.
    `hopeless`, `obvious`: the same of a trial's first pair, above and below which no second is needed: `hopeless` of fewer
    and more, `obvious` of more alone. `idle_s`: after so long without a step what was known is stale.
    """

    trial_steps: int = 3
    slow_steps: int = 3
    doubled: float = 2.0
    collapsed: float = 8.0
    suspicious: float = 1.3
    best_forgets: float = 1.002
    first_pause_s: float = 0.5
    last_pause_s: float = 8.0
    keep_more_below: float = 0.95
    keep_fewer_below: float = 0.9
    hopeless: float = 1.2
    obvious: float = 0.7
    idle_s: float = 1.0


DEFAULT_RULES: Final = Rules()


@dataclass(frozen=True, slots=True)
class Trial:
    """Threads on trial, alternating with the settled number on steps of `tokens` tokens. Times in seconds."""

    threads: int
    tokens: int
    tried_s: tuple[float, ...] = ()
    settled_s: tuple[float, ...] = ()

    @property
    def is_next(self) -> bool:
        """Whether the next step is computed with the threads on trial."""
        return len(self.tried_s) <= len(self.settled_s)

    def ratio(self) -> float:
        """Return the time of a step on trial over that of a settled one; needs one of each."""
        return median(self.tried_s) / median(self.settled_s)


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
    pause_s: float = 0.5
    last_s: float = 0.0
    ask_fewer_next: bool = False
    questioned: bool = False

    @property
    def threads(self) -> int:
        """Threads to compute the next step with."""
        return self.trial.threads if self.trial is not None and self.trial.is_next else self.settled


def start(most: int, now_s: float, *, rules: Rules = DEFAULT_RULES) -> Governor:
    """Return a governor that computes with all threads, until it has seen that fewer are faster."""
    return Governor(most, most, ask_at_s=now_s + rules.first_pause_s, pause_s=rules.first_pause_s, last_s=now_s)


def observe(state: Governor, *, tokens: int, seconds: float, now_s: float, rules: Rules = DEFAULT_RULES) -> Governor:
    """Return the state after a step of `tokens` tokens that took `seconds` with `state.threads` threads."""
    if state.most <= 1 or not 0 < tokens <= MAX_TOKENS:
        return state
    if now_s - seconds - state.last_s > rules.idle_s:
        state = _woken(state, now_s, rules)
    state = replace(state, last_s=now_s)
    if state.trial is not None:
        if tokens != state.trial.tokens:  # another batch cannot be compared; the next question comes soon
            return replace(state, trial=None, ask_at_s=min(state.ask_at_s, now_s + rules.first_pause_s))
        return _tried(state, state.trial, seconds, now_s, rules)
    usual = state.usual_s.get(tokens)
    if usual is None:
        state = _noted(state, tokens, seconds, rules)
        return _asked(state, tokens, now_s, suspicious=False) if now_s >= state.ask_at_s else state
    ratio = seconds / usual
    if ratio >= rules.doubled:
        return _slowed(state, tokens, seconds, ratio, rules)
    state = _noted(state, tokens, usual + (seconds - usual) / 8, rules, seconds)
    suspicious = state.usual_s[tokens] > rules.suspicious * state.best_s[tokens]
    return _asked(state, tokens, now_s, suspicious=suspicious) if now_s >= state.ask_at_s else state


def _stride(threads: int) -> int:
    """Return by how many threads to go up or down: one on small machines, an eighth on large ones."""
    return max(1, threads // 8)


def _woken(state: Governor, now_s: float, rules: Rules) -> Governor:
    """Forget what was going on before a rest: others may have come or gone."""
    ask_at_s = min(state.ask_at_s, now_s + rules.first_pause_s)
    return replace(state, trial=None, slow=(), ask_at_s=ask_at_s, pause_s=rules.first_pause_s)


def _noted(state: Governor, tokens: int, usual: float, rules: Rules, seconds: float | None = None) -> Governor:
    """Note a step's time with the settled threads."""
    seconds = usual if seconds is None else seconds
    best = min(state.best_s.get(tokens, seconds) * rules.best_forgets, seconds)
    return replace(state, usual_s={**state.usual_s, tokens: usual}, best_s={**state.best_s, tokens: best}, slow=())


def _slowed(state: Governor, tokens: int, seconds: float, ratio: float, rules: Rules) -> Governor:
    slow = (*state.slow, seconds)
    if len(slow) < rules.slow_steps and ratio < rules.collapsed:
        return replace(state, slow=slow)
    # What is usual has changed.
    state = replace(state, usual_s={**state.usual_s, tokens: median(slow)}, slow=())
    if state.settled <= 1:
        return state
    return replace(state, trial=Trial(max(1, state.settled - _stride(state.settled)), tokens))


def _asked(state: Governor, tokens: int, now_s: float, *, suspicious: bool) -> Governor:
    suspicious = suspicious or not state.questioned
    fewer = state.settled > 1 and suspicious and (state.ask_fewer_next or state.settled >= state.most)
    if not fewer and state.settled >= state.most:
        return state
    step = _stride(state.settled)
    threads = max(1, state.settled - step) if fewer else min(state.most, state.settled + step)
    return replace(state, trial=Trial(threads, tokens), ask_fewer_next=not fewer, ask_at_s=now_s + state.pause_s)


def _tried(state: Governor, trial: Trial, seconds: float, now_s: float, rules: Rules) -> Governor:
    if trial.is_next:
        trial = replace(trial, tried_s=(*trial.tried_s, seconds))
    else:
        trial = replace(trial, settled_s=(*trial.settled_s, seconds))
    state = replace(state, trial=trial)
    if not trial.settled_s:
        return state
    ratio, is_fewer = trial.ratio(), trial.threads < state.settled
    clear = ratio >= rules.hopeless or ratio <= (1 / rules.collapsed if is_fewer else rules.obvious)
    if len(trial.settled_s) < rules.trial_steps and not clear:
        return state
    limit = rules.keep_fewer_below if is_fewer else rules.keep_more_below
    return _kept(state, trial, now_s, rules) if ratio < limit else _refused(state, trial, now_s, rules)


def _kept(state: Governor, trial: Trial, now_s: float, rules: Rules) -> Governor:
    seconds = {trial.tokens: median(trial.tried_s)}
    return Governor(
        settled=trial.threads,
        most=state.most,
        usual_s=seconds,
        best_s=seconds,
        ask_at_s=now_s + rules.first_pause_s,
        pause_s=rules.first_pause_s,
        last_s=now_s,
        ask_fewer_next=state.ask_fewer_next,
        # Coming from fewer, it has just been compared with fewer.
        questioned=trial.threads > state.settled,
    )


def _refused(state: Governor, trial: Trial, now_s: float, rules: Rules) -> Governor:
    pause_s = min(rules.last_pause_s, state.pause_s * 2)
    return replace(
        state,
        trial=None,
        usual_s={**state.usual_s, trial.tokens: median(trial.settled_s)},
        ask_at_s=now_s + pause_s,
        pause_s=pause_s,
        questioned=state.questioned or trial.threads < state.settled,
    )
