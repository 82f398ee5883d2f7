"""One question and its answer on the screen."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cli.chat import stats
from cli.chat.stream import ChatReader, Waiting
from cli.terminal import note

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cli.chat.client import ChatClient, ChatOptions, Message
    from cli.chat.screen import Screen


@dataclass(frozen=True)
class Said:
    """What the model said; `interrupted` when Ctrl-C stopped it."""

    text: str
    interrupted: bool


@dataclass
class Turn:
    """Asks and shows. `options` and `stats` may change between two answers."""

    client: ChatClient
    screen: Screen
    options: ChatOptions
    stats: bool = False
    clock: Callable[[], float] = time.monotonic

    def answer(self, messages: Sequence[Message]) -> Said:
        """Stream one answer to the screen. Ctrl-C cancels it at the mesh and returns what came so far. Raises CliError."""
        reader = ChatReader()
        watch = stats.Stopwatch(asked=self.clock())
        interrupted = False
        try:
            self.screen.wait("waiting for the answer")
            # Closing the stream closes the connection: the mesh cancels the request and frees its slot at once.
            with closing(self.client.ask(messages, self.options, reader)) as events:
                for event in events:
                    if not isinstance(event, Waiting):
                        watch.piece(self.clock())
                    self.screen.show(event)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self.screen.end()
        if self.stats and not interrupted:
            note(stats.describe(watch, reader.usage))
        if reader.finish_reason == "length":
            note("(the answer ended at the token limit)")
        return Said(reader.text, interrupted)
