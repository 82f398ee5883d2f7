"""Which tokens go into the next step: one of every running sequence, and a fair share of what waits to be prefilled."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """What steps have cost lately, seconds: a step that only decodes, and one prefilled token. 0 means not seen yet."""

    decode_step_s: float = 0.0
    prefill_token_s: float = 0.0

    def seen(self, *, decoded: int, prefilled: int, seconds: float) -> "Pace":
        """Return the pace after a step of `decoded` and `prefilled` tokens."""
        if prefilled == 0:
            return Pace(_blend(self.decode_step_s, seconds), self.prefill_token_s)
        if decoded > 0 and self.decode_step_s == 0.0:
            return self  # cannot tell what the prefilled part of a mixed step cost
        cost = max(seconds - (self.decode_step_s if decoded else 0.0), 0.0) / prefilled
        return Pace(self.decode_step_s, _blend(self.prefill_token_s, cost))

    def decode_s(self, decoding: int) -> float:
        """Return what a step takes that only decodes; where none was seen, as much as prefilling so many tokens."""
        return self.decode_step_s or decoding * self.prefill_token_s

    def step_s(self, *, decoding: int, prompt_tokens: int) -> float:
        """Return about what a step takes that goes on with so many answers, or else reads in so many tokens."""
        return self.decode_s(decoding) if decoding else prompt_tokens * self.prefill_token_s


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of a step.

    `batch_tokens`: most tokens in one. `lone_tokens`: most of a prompt that nobody else takes part beside, so that who
    comes meanwhile waits for a piece of it only. `stall_s`: how long a step may always take. `stall_ratio`: or this many times a
    step that only decodes. Either grows with the prompts that wait per running answer, to `most_stall_s` at most.
    `floor_tokens`: prefilled per step at least, so that prefill always goes on.
    """

    batch_tokens: int
    lone_tokens: int
    stall_s: float = 0.1
    stall_ratio: float = 2.5
    most_stall_s: float = 1.0
    floor_tokens: int = 8


def prefill_budget(pace: Pace, limits: StepLimits, *, decoding: int, prefilling: int) -> int:
    """Return how many tokens of `prefilling` prompts go into the next step beside `decoding` answers of one token each.

    Where many wait for few, the few wait longer: the sooner all decode together, the sooner all are done. For the same
    reason several prompts go into one step, as long as nobody decodes yet.
    """
    room = max(limits.batch_tokens - decoding, 0)
    if decoding == 0:
        return room if prefilling > 1 else min(room, limits.lone_tokens)
    if pace.prefill_token_s <= 0.0:
        return min(room, limits.floor_tokens)
    decode_s = pace.decode_s(decoding)
    usual_s = max(limits.stall_s, limits.stall_ratio * decode_s)
    crowded_s = min(usual_s * (2 * prefilling / decoding - 1), limits.most_stall_s)
    spare_s = max(usual_s, crowded_s) - decode_s
    if room * pace.prefill_token_s <= spare_s:
        return room
    return min(room, max(limits.floor_tokens, int(spare_s / pace.prefill_token_s)))


def share_prefill(remaining: Sequence[int], budget: int) -> list[int]:
    """Return how many tokens each prompt gets of `budget`, in the order of `remaining` (oldest first).

    A quarter is shared equally, so that nobody is forgotten. The rest goes to those that need least, the oldest first
    among equals: prompts then end one after the other instead of all at the end, and a short one passes a long one.
    """
    shares = _share_equally(remaining, budget // 4)
    left = budget - sum(shares)
    for index in sorted(range(len(remaining)), key=lambda index: remaining[index]):
        more = min(remaining[index] - shares[index], left)
        shares[index] += more
        left -= more
    return shares


def _share_equally(wants: Sequence[int], budget: int) -> list[int]:
    """Return shares of which none is smaller than another, unless it is all that was wanted. Odd ones go to the first."""
    shares = list(wants)
    # From the one that wants least: as long as an equal share is enough for it, it gets what it wants.
    wanting = sorted(range(len(wants)), key=lambda index: wants[index])
    for place, index in enumerate(wanting):
        each, odd = divmod(budget, len(wanting) - place)
        if wants[index] > each:
            for order, other in enumerate(sorted(wanting[place:])):
                shares[other] = each + (1 if order < odd else 0)
            break
        budget -= wants[index]
    return shares


def _blend(old: float, new: float) -> float:
    """Move an eighth of the way to the new value; the first value counts whole."""
    return new if old == 0.0 else old + (new - old) / 8
