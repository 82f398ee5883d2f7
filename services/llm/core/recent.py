"""A few things that were seen last."""

from collections import OrderedDict
from collections.abc import Hashable


class Recent:
    """Remembers the `most` things that were added or asked about last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._things: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, thing: Hashable) -> None:
        """Remember a thing."""
        self._things[thing] = None
        self._things.move_to_end(thing)
        if len(self._things) > self._most:
            self._things.popitem(last=False)

    def __contains__(self, thing: Hashable) -> bool:
        if thing not in self._things:
            return False
        self._things.move_to_end(thing)
        return True
