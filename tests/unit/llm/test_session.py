"""The session of many requests: what must hold whatever order messages are read in."""

import asyncio

from omniserve.llm.v1 import llm_pb2 as pb
from services.llm.session import Session


class Generator:
    """Runs for ever, and counts what was begun."""

    def __init__(self):
        self.begun = 0

    async def run(self, work, port):
        self.begun += 1
        await asyncio.Event().wait()


async def test_a_request_cancelled_before_its_first_step_leaves_the_session_idle():
    generator = Generator()
    session = Session(generator)

    async def requests():
        chat = pb.ChatRequest(messages=[pb.Message(role="user", content=[pb.ContentPart(text="hi")])])
        yield pb.GenerateSessionRequest(start=pb.StartGeneration(request=1, chat=chat))
        yield pb.GenerateSessionRequest(cancel=pb.CancelGeneration(request=1))
        await asyncio.sleep(0)
        session.drain()
        await asyncio.Event().wait()

    async def write(_):
        raise AssertionError("nothing was begun, so there is nothing to tell")

    async with asyncio.timeout(10):
        await session.serve(requests(), write)
    assert generator.begun == 0
