"""The guard of errors on a bare grpc.aio server, with all four kinds of RPC."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from services.kit.errors import DomainError, ErrorGuard, Reason, from_rpc_error
from services.kit.handlers import GuardedHandlers

SERVICE = "test.Four"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


@asynccontextmanager
async def calling(behave, draining=lambda: False):
    """Serve `behave(context)` as the body of all four kinds; give a function that calls one of them to its end."""

    async def single(_request, context):
        return await behave(context) or b"done"

    async def streaming(_request, context):
        yield b"first"
        await behave(context)

    handlers = {
        "unary_unary": grpc.unary_unary_rpc_method_handler(single),
        "stream_unary": grpc.stream_unary_rpc_method_handler(single),
        "unary_stream": grpc.unary_stream_rpc_method_handler(streaming),
        "stream_stream": grpc.stream_stream_rpc_method_handler(streaming),
    }
    server = grpc.aio.server()
    served = grpc.method_handlers_generic_handler(SERVICE, handlers)
    server.add_generic_rpc_handlers((GuardedHandlers([served], [ErrorGuard(draining=draining)]),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def call(kind):
        path = f"/{SERVICE}/{kind}"
        if kind == "unary_unary":
            return [await channel.unary_unary(path)(b"")]
        if kind == "stream_unary":
            return [await channel.stream_unary(path)(iter([b"", b""]))]
        if kind == "unary_stream":
            return [message async for message in channel.unary_stream(path)(b"")]
        return [message async for message in channel.stream_stream(path)(iter([b"", b""]))]

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield call
    await server.stop(None)


async def failure(call, kind) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(kind)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
async def test_a_domain_error_reaches_the_caller_with_reason_field_and_numbers(kind):
    async def behave(_context):
        raise DomainError(Reason.QUEUE_FULL, "10000 of 10000 wait", field="messages", retry_after_ms=1500)

    async with calling(behave) as call:
        error = await failure(call, kind)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    read = from_rpc_error(error)
    assert (read.reason, read.message) == (Reason.QUEUE_FULL, "10000 of 10000 wait")
    assert (read.field, read.retry_after_ms) == ("messages", 1500)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_that_succeeds_is_left_alone(kind):
    async def behave(_context):
        return None

    async with calling(behave) as call:
        assert await call(kind) == [b"first" if kind.endswith("stream") else b"done"]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unexpected_exception_is_internal_logged_with_its_stack_and_tells_no_secrets(kind, caplog):
    async def behave(_context):
        raise RuntimeError("password is hunter2")

    async with calling(behave) as call:
        error = await failure(call, kind)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert from_rpc_error(error).reason is Reason.INTERNAL
    assert "hunter2" not in (error.details() or "")
    assert f"/{SERVICE}/{kind}" in (error.details() or "")
    logged = [record for record in caplog.records if record.name == "services.kit.errors"]
    assert [record.message for record in logged] == ["unexpected error"]
    assert logged[0].exc_info is not None
    assert "hunter2" in str(logged[0].exc_info[1])


async def test_a_status_that_the_handler_chose_itself_passes_untouched():
    async def behave(context):
        await context.abort(grpc.StatusCode.DATA_LOSS, "as I say")

    async with calling(behave) as call:
        for kind in KINDS:
            error = await failure(call, kind)
            assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "as I say")


async def test_trailing_metadata_that_the_handler_set_is_kept_beside_the_details():
    async def behave(context):
        context.set_trailing_metadata((("x-seen", "yes"),))
        raise DomainError(Reason.NOT_FOUND, "no model 'x'")

    async with calling(behave) as call:
        error = await failure(call, "unary_stream")
    assert ("x-seen", "yes") in list(error.trailing_metadata())
    assert from_rpc_error(error).reason is Reason.NOT_FOUND


async def test_a_domain_error_out_of_a_task_group_is_still_that_error():
    async def fail():
        raise DomainError(Reason.TOO_LARGE, "97 MiB of 96")

    async def behave(_context):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    async with calling(behave) as call:
        assert from_rpc_error(await failure(call, "unary_unary")).reason is Reason.TOO_LARGE


async def test_a_failure_of_a_peer_that_the_handler_let_through_keeps_the_peers_reason():
    async def refuse(_context):
        raise DomainError(Reason.NO_CAPACITY, "0 MiB free")

    async with calling(refuse) as call_peer:

        async def behave(_context):
            await call_peer("unary_unary")

        async with calling(behave) as call:
            error = await failure(call, "stream_stream")
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "0 MiB free")
    assert from_rpc_error(error).reason is Reason.NO_CAPACITY


async def test_a_message_in_any_script_arrives_whole():
    text = "größer als 10 — 漢字 ☃"

    async def behave(_context):
        raise DomainError(Reason.INVALID_REQUEST, text)

    async with calling(behave) as call:
        assert from_rpc_error(await failure(call, "unary_unary")).message == text


@pytest.mark.parametrize("draining", [False, True])
async def test_a_cancellation_that_is_not_the_rpcs_own_is_answered_instead_of_leaving_the_caller_hanging(draining):
    async def behave(_context):
        worker = asyncio.ensure_future(asyncio.Event().wait())
        worker.cancel()
        await worker

    async with calling(behave, draining=lambda: draining) as call:
        for kind in KINDS:
            error = from_rpc_error(await failure(call, kind))
            assert error.reason is (Reason.DRAINING if draining else Reason.INTERNAL)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_caller_that_leaves_cancels_the_handler_and_nothing_is_logged_as_an_error(kind, caplog):
    entered, left = asyncio.Event(), asyncio.Event()

    async def behave(_context):
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    async with calling(behave) as call:
        caller = asyncio.ensure_future(call(kind))
        await entered.wait()
        await asyncio.sleep(0.05)  # gRPC's own channel forgets to cancel before the first message; kit's does not
        caller.cancel()
        await left.wait()
        with pytest.raises(asyncio.CancelledError):
            await caller
    assert not [record for record in caplog.records if record.name.startswith("services.kit")]


async def test_a_caller_that_leaves_while_a_message_is_written_closes_the_handlers_generator_in_its_own_task():
    """Flow control holds the writer; the generator must not be left to the garbage collector."""
    tasks: list[asyncio.Task[None] | None] = []
    closed = asyncio.Event()

    async def flood(_request, _context):
        tasks.append(asyncio.current_task())
        try:
            while True:
                yield bytes(1 << 20)
        finally:
            tasks.append(asyncio.current_task())
            closed.set()

    server = grpc.aio.server()
    handlers = {"Flood": grpc.unary_stream_rpc_method_handler(flood)}
    served = grpc.method_handlers_generic_handler(SERVICE, handlers)
    server.add_generic_rpc_handlers((GuardedHandlers([served], [ErrorGuard()]),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(f"/{SERVICE}/Flood")(b"")
        assert len(await call.read()) == 1 << 20
        call.cancel()
        await closed.wait()
    await server.stop(None)
    assert tasks[0] is tasks[1]


async def test_a_handler_that_writes_to_the_context_itself_is_wrapped_too():
    async def write(_request, context):
        await context.write(b"one")
        await context.write(b"two")
        raise DomainError(Reason.LOADING, "7 of 10")

    server = grpc.aio.server()
    handlers = {"Write": grpc.unary_stream_rpc_method_handler(write)}
    served = grpc.method_handlers_generic_handler(SERVICE, handlers)
    server.add_generic_rpc_handlers((GuardedHandlers([served], [ErrorGuard()]),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(f"/{SERVICE}/Write")(b"")
        assert [await call.read(), await call.read()] == [b"one", b"two"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    await server.stop(None)
    assert from_rpc_error(caught.value).reason is Reason.LOADING
