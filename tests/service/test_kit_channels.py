"""Channels to peers, against real servers that misbehave."""

# ruff: noqa: N802 - servicer methods carry the contract's names

import asyncio
import gc
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from omniserve.llm.v1 import llm_pb2, llm_pb2_grpc
from services.kit.access import TOKEN_KEY
from services.kit.channels import ending, open_channel, service_config, time_left_s
from services.kit.errors import DomainError, ErrorGuard, Reason, from_rpc_error
from services.kit.handlers import GuardedHandlers
from services.kit.server import running_server
from services.kit.settings import MeshSettings
from services.kit.tokens import ensure_token

LLM = "omniserve.llm.v1.LlmService"


class Settings(MeshSettings):
    service = "llm"


def declare(package: str) -> None:
    """Add a contract of our shape: a safe and an unsafe unary RPC, and a safe stream."""
    options = {"idempotency_level": "NO_SIDE_EFFECTS"}
    file = descriptor_pb2.FileDescriptorProto(
        name=f"omniserve/{package}/v1/{package}.proto",
        package=f"omniserve.{package}.v1",
        syntax="proto3",
        message_type=[{"name": "Empty"}],
        service=[
            {
                "name": "Shop",
                "method": [
                    {"name": "Look", "options": options},
                    {"name": "Buy"},
                    {"name": "Watch", "options": options, "server_streaming": True},
                ],
            }
        ],
    )
    for method in file.service[0].method:
        method.input_type = method.output_type = f".omniserve.{package}.v1.Empty"
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())


declare("kittest")
SHOP = "omniserve.kittest.v1.Shop"


@asynccontextmanager
async def shop(state_dir, *, failures, decided=False):
    """Serve the shop: `failures` calls end with UNAVAILABLE, by an accident or as decided. Gives a channel and a log."""
    seen: list[str] = []

    def handler(name):
        async def behave(_request, context):
            seen.append(name)
            if len(seen) <= failures and decided:
                raise DomainError(Reason.LOADING, "7 of 10 files")
            if len(seen) <= failures:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
            return b""

        return grpc.unary_unary_rpc_method_handler(behave)

    server = grpc.aio.server()
    handlers = {name: handler(name) for name in ("Look", "Buy")}
    served = grpc.method_handlers_generic_handler(SHOP, handlers)
    server.add_generic_rpc_handlers((GuardedHandlers([served], [ErrorGuard()]),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address = f"127.0.0.1:{port}"
    async with open_channel(address, caller="facade", state_dir=state_dir, peers=["kittest"]) as channel:
        yield channel, seen
    await server.stop(None)


def test_only_safe_unary_rpcs_of_imported_contracts_are_retried():
    config = service_config(["kittest", "not-imported"])
    assert [each["name"] for each in config["methodConfig"]] == [[{"service": SHOP, "method": "Look"}]]
    assert "methodConfig" not in service_config(["not-imported"])
    assert "retryThrottling" in config


async def test_a_safe_rpc_is_retried_while_the_peer_is_unavailable(tmp_path):
    async with shop(tmp_path, failures=2) as (channel, seen):
        await channel.unary_unary(f"/{SHOP}/Look")(b"")
    assert seen == ["Look"] * 3


async def test_an_rpc_with_effects_is_never_retried(tmp_path):
    async with shop(tmp_path, failures=2) as (channel, seen):
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(f"/{SHOP}/Buy")(b"")
    assert seen == ["Buy"]


async def test_a_peer_that_decided_to_refuse_is_not_asked_again(tmp_path):
    async with shop(tmp_path, failures=9, decided=True) as (channel, seen):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{SHOP}/Look")(b"")
    assert seen == ["Look"]
    assert from_rpc_error(caught.value).reason is Reason.LOADING


class Llm(llm_pb2_grpc.LlmServiceServicer):
    def __init__(self):
        self.calls = 0
        self.entered, self.left = asyncio.Event(), asyncio.Event()
        self.metadata: dict[str, str] = {}

    async def ListModels(self, request, context):
        self.calls += 1
        self.metadata = dict(context.invocation_metadata())
        raise DomainError(Reason.LOADING, "7 of 10 files")

    async def Chat(self, request, context):
        self.entered.set()
        try:
            await asyncio.Event().wait()
            yield llm_pb2.ChatResponse()
        finally:
            self.left.set()

    async def Complete(self, request, context):
        try:
            yield llm_pb2.CompleteResponse()
            self.entered.set()
            await asyncio.Event().wait()
        finally:
            self.left.set()

    async def GenerateSession(self, request_iterator, context):
        async for _ in request_iterator:
            yield llm_pb2.GenerateSessionResponse()

    async def Embed(self, request, context):
        size = len(request.inputs[0].text)
        return llm_pb2.EmbedResponse(model="x" * size)


@asynccontextmanager
async def serving(state_dir, listen="127.0.0.1:0"):
    llm = Llm()
    async with running_server(
        name="llm",
        settings=Settings(state_dir=state_dir),
        register=lambda server: llm_pb2_grpc.add_LlmServiceServicer_to_server(llm, server),
        service_names=[LLM],
        listen=listen,
    ) as port:
        yield llm, f"127.0.0.1:{port}"


@asynccontextmanager
async def connected(state_dir):
    async with (
        serving(state_dir) as (llm, address),
        open_channel(address, caller="facade", state_dir=state_dir) as channel,
    ):
        yield llm, channel


async def test_every_call_shows_the_callers_token_and_nothing_else_of_its_own(tmp_path):
    async with connected(tmp_path) as (llm, channel):
        with pytest.raises(grpc.aio.AioRpcError):
            await llm_pb2_grpc.LlmServiceStub(channel).ListModels(llm_pb2.ListModelsRequest())
    assert llm.metadata[TOKEN_KEY] == ensure_token(tmp_path, "facade")
    assert set(llm.metadata) == {TOKEN_KEY, "user-agent"}


@pytest.mark.parametrize("rpc", ["Chat", "Complete"])
@pytest.mark.parametrize("style", ["async for", "read"])
@pytest.mark.parametrize("steps", range(12))
async def test_a_reader_who_is_cancelled_at_any_moment_cancels_the_handler(tmp_path, rpc, style, steps):
    """Chat sends nothing before it waits, Complete one message; the moment moves step by step over the call's start."""
    gc.disable()  # the garbage collector would hide a call that nobody cancelled
    try:
        async with connected(tmp_path) as (llm, channel):
            request = llm_pb2.ChatRequest() if rpc == "Chat" else llm_pb2.CompleteRequest()
            call = getattr(llm_pb2_grpc.LlmServiceStub(channel), rpc)(request)

            async def read():
                while style == "read":
                    await call.read()
                async for _ in call:
                    pass

            reader = asyncio.ensure_future(read())
            await llm.entered.wait()
            for _ in range(steps):
                await asyncio.sleep(0)
            reader.cancel()
            async with asyncio.timeout(20):
                await llm.left.wait()
            assert call.cancelled()
    finally:
        gc.enable()


async def test_a_reader_who_stops_early_ends_the_call_when_the_block_ends(tmp_path):
    gc.disable()
    try:
        async with connected(tmp_path) as (llm, channel):
            stub = llm_pb2_grpc.LlmServiceStub(channel)
            with ending(stub.Complete(llm_pb2.CompleteRequest())) as call:
                async for _ in call:
                    break
            await llm.left.wait()
    finally:
        gc.enable()


async def test_a_bidirectional_call_can_be_written_and_read_by_hand(tmp_path):
    async with connected(tmp_path) as (_, channel):
        call = llm_pb2_grpc.LlmServiceStub(channel).GenerateSession()
        for _ in range(3):
            await call.write(llm_pb2.GenerateSessionRequest())
            assert await call.read() == llm_pb2.GenerateSessionResponse()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_a_restarted_peer_is_found_again_by_the_same_channel(tmp_path):
    async with serving(tmp_path) as (_, address):
        channel = open_channel(address, caller="facade", state_dir=tmp_path)
        await channel.channel_ready()
    stub = llm_pb2_grpc.LlmServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ListModels(llm_pb2.ListModelsRequest())
    assert from_rpc_error(caught.value, unavailable=Reason.LOADING).reason is Reason.LOADING
    async with serving(tmp_path, listen=address) as (llm, _):
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ListModels(llm_pb2.ListModelsRequest(), wait_for_ready=True, timeout=20)
        assert llm.calls == 1
    await channel.close()


async def test_a_message_of_up_to_96_mib_passes_both_ways_and_a_larger_one_is_too_large(tmp_path):
    async with connected(tmp_path) as (_, channel):
        stub = llm_pb2_grpc.LlmServiceStub(channel)

        async def embed(size):
            return await stub.Embed(llm_pb2.EmbedRequest(inputs=[llm_pb2.EmbedInput(text="x" * size)]))

        assert len((await embed(95 << 20)).model) == 95 << 20
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await embed(97 << 20)
    assert from_rpc_error(caught.value).reason is Reason.TOO_LARGE


@pytest.mark.parametrize(("given", "expected"), [(None, 30.0), (1000, 30.0), (5, 5.0)])
async def test_a_deadline_for_onward_calls_never_outlasts_the_callers(given, expected):
    left: list[float] = []

    async def behave(_request, context):
        left.append(time_left_s(context, at_most_s=30.0))
        return b""

    server = grpc.aio.server()
    handlers = {"Ask": grpc.unary_unary_rpc_method_handler(behave)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.T", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.unary_unary("/test.T/Ask")(b"", timeout=given)
    await server.stop(None)
    assert left[0] == pytest.approx(expected, abs=4.9)
