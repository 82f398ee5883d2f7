import asyncio

from omniserve.llm.v1 import llm_pb2 as pb
from services.llm.core.wire import Delta, Finish
from services.llm.outbox import Outbox, Port

END = Finish("length", None, 5, 0, 2)


async def test_outputs_that_nobody_took_yet_are_merged_for_each_request() -> None:
    outbox = Outbox()
    for text in ("a", "b", "c"):
        for request in (1, 2):
            outbox.put_delta(request, Delta(0, 0, text, 1))
    said = await outbox.take()
    assert [(each.request, each.message.choices[0].text, each.message.choices[0].tokens) for each in said] == [
        (1, "abc", 3),
        (2, "abc", 3),
    ]


async def test_a_request_s_events_keep_their_order() -> None:
    outbox = Outbox()
    port = Port(outbox, 7, "m")
    port.queued(2, None)
    port.delta(Delta(0, 0, "x", 1))
    port.delta(Delta(0, 1, "y", 1, END))
    port.done(pb.Usage(prompt_tokens=5))
    said = await outbox.take()
    assert [each.kind for each in said] == ["queued", "output", "done"]
    first, second = said[1].message.choices
    assert (first.text, second.text, second.finish_reason) == ("x", "y", pb.FINISH_REASON_LENGTH)


async def test_taking_waits_for_news_and_ends_when_the_box_is_closed() -> None:
    outbox = Outbox()

    async def later() -> None:
        outbox.put_delta(1, Delta(0, 0, "late", 1))
        outbox.close()

    async with asyncio.TaskGroup() as group:
        taking = group.create_task(outbox.take())
        await asyncio.sleep(0)
        assert not taking.done()
        group.create_task(later())
    assert [each.message.choices[0].text for each in taking.result()] == ["late"]
    assert await outbox.take() == []
