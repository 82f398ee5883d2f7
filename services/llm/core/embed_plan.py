"""Which inputs go into the next step of an embedding engine: whole ones, a turn each, as many as fit."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRoom:
    """What fits into a step. `tokens`: beyond so many no further input is taken, though the first one always is."""

    tokens: int
    sequences: int


def share_step(waiting: Sequence[Sequence[int]], room: StepRoom) -> list[int]:
    """Return how many inputs of each request the step takes, given the tokens of those that wait.

    Requests take turns, one input each, so a short request is done when its turn comes, whatever a long one brings along.
    An input that does not fit any more ends its request's turns in this step; shorter ones of others may still ride.
    """
    taken = [0] * len(waiting)
    taking = [number for number, lengths in enumerate(waiting) if lengths]
    tokens = sequences = 0
    while taking:
        going_on = []
        for number in taking:
            length = waiting[number][taken[number]]
            if sequences == room.sequences or (sequences and tokens + length > room.tokens):
                continue
            tokens += length
            sequences += 1
            taken[number] += 1
            if taken[number] < len(waiting[number]):
                going_on.append(number)
        taking = going_on
    return taken
