"""The text hosts of all models: started when a vocabulary is needed, ended when nobody has needed it for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from services.kit.clock import Clock
from services.kit.owner import Owner
from services.llm.resident import Resident

IDLE_S: Final = 60.0
"""How long the text host of a model that is not loaded outlives its last call."""


class Vocabularies:
    """Runs text hosts."""

    def __init__(self, owner: Owner, clock: Clock) -> None:
        self._owner = owner
        self._clock = clock

    @contextmanager
    def visit(self, resident: Resident) -> Iterator[None]:
        """Have a model's vocabulary for the length of the block, whether or not the model is loaded."""
        resident.visitors += 1
        self.start(resident)
        try:
            yield
        finally:
            resident.visitors -= 1
            resident.last_visit_s = self._clock.monotonic()
            if resident.retired:
                resident.tell()

    def start(self, resident: Resident) -> None:
        """Have a model's text host run."""
        if resident.texting is None:
            resident.texting = self._owner.start(resident.text.supervise(), name=f"text host of {resident.name}")
            resident.texting.add_done_callback(lambda _: self._ended(resident))
        elif resident.texting.cancelling():
            resident.texts_again = True

    def _ended(self, resident: Resident) -> None:
        resident.texting = None
        if resident.texts_again:
            resident.texts_again = False
            self.start(resident)

    def tidy(self, unloaded: Iterable[Resident], now_s: float) -> float | None:
        """End what nobody needs, of models that are not in memory; return when to look again."""
        again: list[float] = []
        for resident in unloaded:
            if resident.texting is None or resident.visitors:
                continue
            ends_s = resident.last_visit_s + IDLE_S
            if now_s >= ends_s:
                resident.texting.cancel()
            else:
                again.append(ends_s)
        return min(again, default=None)
