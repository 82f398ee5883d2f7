"""What the servicer does by itself while it waits."""

import asyncio

from services.kit.clock import ManualClock
from services.relay.service import RelayServicer


class Stream:
    """Stands for a call's context: keeps what is written, and ends the waiting after a number of messages."""

    def __init__(self, answered, count):
        self.answered = answered
        self.count = count
        self.written = []

    async def write(self, message):
        self.written.append(message)
        if len(self.written) == self.count:
            self.answered.set()


async def test_a_waiting_caller_is_told_every_while_and_nothing_once_the_worker_answers():
    answered, clock = asyncio.Event(), ManualClock()
    servicer = RelayServicer(None, None, None, None, clock, default_ttl_s=60, told_every_s=0.001, envoy_version=None)
    stream = Stream(answered, 3)
    await servicer._tell_waiting(answered, stream)
    assert [message.WhichOneof("event") for message in stream.written] == ["queued"] * 3
    assert not stream.written[0].queued.HasField("position")


async def test_an_answer_that_is_there_at_once_says_nothing_of_waiting():
    answered = asyncio.Event()
    answered.set()
    servicer = RelayServicer(
        None, None, None, None, ManualClock(), default_ttl_s=60, told_every_s=0.001, envoy_version=None
    )
    stream = Stream(answered, 1)
    await servicer._tell_waiting(answered, stream)
    assert stream.written == []
