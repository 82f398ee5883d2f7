"""The server itself: health, reflection, drain, crash; in this process and, for signals, in one of its own."""

# ruff: noqa: N802 - servicer methods carry the contract's names

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from omniserve.llm.v1 import llm_pb2, llm_pb2_grpc
from services.kit.channels import ending, open_channel
from services.kit.errors import DomainError, Reason, from_rpc_error
from services.kit.health import HealthHandle
from services.kit.owner import OwnedTaskCrashed, Owner
from services.kit.server import running_server, serve
from services.kit.settings import MeshSettings

ROOT = Path(__file__).resolve().parents[2]
LLM = "omniserve.llm.v1.LlmService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Settings(MeshSettings):
    service = "llm"


class Llm(llm_pb2_grpc.LlmServiceServicer):
    """Streams until it is told to finish."""

    def __init__(self):
        self.finish, self.cancelled = asyncio.Event(), asyncio.Event()

    async def Chat(self, request, context):
        yield llm_pb2.ChatResponse(prefill=llm_pb2.Prefill())
        try:
            await self.finish.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        yield llm_pb2.ChatResponse(done=llm_pb2.Done())

    async def ListModels(self, request, context):
        return llm_pb2.ListModelsResponse()


class Mesh:
    """One served Llm with handles on everything a test may pull."""

    def __init__(self, state_dir, **settings):
        self.state_dir = state_dir
        self.settings = Settings(state_dir=state_dir, **settings)
        self.llm, self.health, self.stop = Llm(), HealthHandle(), asyncio.Event()
        self.port = asyncio.get_running_loop().create_future()
        self.log = []

    def register(self, server):
        llm_pb2_grpc.add_LlmServiceServicer_to_server(self.llm, server)

    async def serve(self, owner, on_drain=None):
        await serve(
            name="llm",
            settings=self.settings,
            listen="127.0.0.1:0",
            register=self.register,
            service_names=[LLM],
            owner=owner,
            on_drain=on_drain,
            started=self.port.set_result,
            health=self.health,
            stop=self.stop,
        )

    async def run(self, on_drain=None):
        async with Owner() as owner:
            await self.serve(owner, on_drain)

    @asynccontextmanager
    async def serving(self, on_drain=None):
        """Serve in the background; give the task and a channel."""
        task = asyncio.ensure_future(self.run(on_drain))
        await asyncio.wait([task, self.port], return_when=asyncio.FIRST_COMPLETED)
        async with open_channel(
            f"127.0.0.1:{self.port.result()}", caller="facade", state_dir=self.state_dir
        ) as channel:
            try:
                yield task, channel
            finally:
                self.stop.set()
                await asyncio.wait([task])
        await task


async def status(channel, service=""):
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return answer.status


async def test_health_is_told_without_a_token_for_the_whole_and_each_service(tmp_path):
    mesh = Mesh(tmp_path)
    async with mesh.serving(), grpc.aio.insecure_channel(f"127.0.0.1:{mesh.port.result()}") as channel:
        assert await status(channel) == SERVING
        assert await status(channel, LLM) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status(channel, "no.such.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_service_can_say_that_it_cannot_work_and_watchers_hear_of_it(tmp_path):
    mesh = Mesh(tmp_path)
    async with mesh.serving() as (_, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        with ending(stub.Watch(health_pb2.HealthCheckRequest(service=LLM))) as watch:
            assert (await watch.read()).status == SERVING
            mesh.health.set(False)
            assert (await watch.read()).status == NOT_SERVING
            assert await status(channel) == NOT_SERVING
            mesh.health.set(True)
            assert (await watch.read()).status == SERVING
            assert await status(channel) == SERVING


async def test_watching_an_unknown_service_says_so_and_goes_on(tmp_path):
    mesh = Mesh(tmp_path)
    async with mesh.serving() as (_, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        with ending(stub.Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))) as watch:
            assert (await watch.read()).status == SERVICE_UNKNOWN
            assert not watch.done()


async def test_a_service_that_starts_unable_to_work_is_not_serving_until_it_says_otherwise(tmp_path):
    mesh = Mesh(tmp_path)
    mesh.health = HealthHandle(serving=False)
    async with mesh.serving() as (_, channel):
        assert await status(channel) == NOT_SERVING
        mesh.health.set(True)
        assert await status(channel) == SERVING


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services_and_their_contracts(tmp_path, version):
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=LLM),
    ]
    async with Mesh(tmp_path).serving() as (_, channel):
        ask = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        answers = [answer async for answer in ask(iter(requests))]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {LLM, "grpc.health.v1.Health"} <= names
    assert b"GenerateSession" in b"".join(answers[1].file_descriptor_response.file_descriptor_proto)


async def test_reflection_wants_a_token_but_any_will_do(tmp_path):
    mesh = Mesh(tmp_path)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with mesh.serving():
        address = f"127.0.0.1:{mesh.port.result()}"
        async with grpc.aio.insecure_channel(address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ServerReflectionInfo(iter([request])).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        async with open_channel(address, caller="envoy-public", state_dir=tmp_path) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            assert (await stub.ServerReflectionInfo(iter([request])).read()).list_services_response.service


async def test_a_stream_that_runs_when_the_drain_begins_is_allowed_to_finish(tmp_path):
    mesh = Mesh(tmp_path, drain_grace_s=60)
    async with mesh.serving() as (task, channel):
        chat = llm_pb2_grpc.LlmServiceStub(channel).Chat(llm_pb2.ChatRequest())
        assert (await chat.read()).HasField("prefill")
        change = mesh.health.next_change()
        mesh.stop.set()
        await change.wait()
        assert mesh.health.draining
        assert not task.done()
        mesh.llm.finish.set()
        assert (await chat.read()).HasField("done")
        assert await chat.read() is grpc.aio.EOF
        await task


async def test_a_stream_that_outlasts_the_grace_is_cancelled_and_its_caller_sees_unavailable(tmp_path):
    mesh = Mesh(tmp_path, drain_grace_s=0.1)
    async with mesh.serving() as (task, channel):
        chat = llm_pb2_grpc.LlmServiceStub(channel).Chat(llm_pb2.ChatRequest())
        await chat.read()
        mesh.stop.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await chat.read()
        await task
    assert mesh.llm.cancelled.is_set()
    assert from_rpc_error(caught.value, unavailable=Reason.DRAINING).reason is Reason.DRAINING


async def test_probes_are_told_before_the_service_says_goodbye_and_calls_still_work_then(tmp_path):
    mesh = Mesh(tmp_path, drain_grace_s=60)
    seen = []

    async def on_drain():
        seen.append(await status(channel))
        seen.append(await llm_pb2_grpc.LlmServiceStub(channel).ListModels(llm_pb2.ListModelsRequest()))

    async with mesh.serving(on_drain) as (task, channel):
        mesh.stop.set()
        await task
    assert seen == [NOT_SERVING, llm_pb2.ListModelsResponse()]


async def test_a_health_watcher_hears_the_drain_and_does_not_hold_it_up(tmp_path):
    mesh = Mesh(tmp_path, drain_grace_s=3600)
    async with mesh.serving() as (task, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        mesh.stop.set()
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        await task


async def test_health_stays_down_once_the_drain_has_begun(tmp_path):
    mesh = Mesh(tmp_path, drain_grace_s=60)

    async def on_drain():
        mesh.health.set(True)
        mesh.log.append(await status(channel))

    async with mesh.serving(on_drain) as (task, channel):
        mesh.stop.set()
        await task
    assert mesh.log == [NOT_SERVING]


@pytest.mark.parametrize("failure", ["raises", "hangs"])
async def test_a_goodbye_that_goes_wrong_does_not_stop_the_drain(tmp_path, failure):
    mesh = Mesh(tmp_path, drain_grace_s=0.1)

    async def on_drain():
        if failure == "raises":
            raise DomainError(Reason.INTERNAL, "no")
        await asyncio.Event().wait()

    async with mesh.serving(on_drain) as (task, _):
        mesh.stop.set()
        await task


async def test_a_handler_that_ignores_its_cancellation_does_not_keep_the_process_alive(tmp_path):
    mesh = Mesh(tmp_path, drain_grace_s=0)
    free = asyncio.Event()

    async def stubborn(request, context):
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue
        return llm_pb2.ListModelsResponse()

    mesh.llm.ListModels = stubborn
    async with mesh.serving() as (task, channel):
        call = asyncio.ensure_future(
            llm_pb2_grpc.LlmServiceStub(channel).ListModels(llm_pb2.ListModelsRequest(), timeout=60)
        )
        await asyncio.sleep(0.1)
        mesh.stop.set()
        await task
        free.set()
        with pytest.raises(grpc.aio.AioRpcError):
            await call


async def test_a_crashed_task_closes_the_server_and_serve_raises_the_crash(tmp_path):
    mesh, go = Mesh(tmp_path, drain_grace_s=3600), asyncio.Event()

    async def crash():
        await go.wait()
        raise RuntimeError("out of paper")

    raised = []

    async def process():
        async with Owner() as owner:
            owner.start(crash(), name="printer")
            try:
                await mesh.serve(owner)
            except BaseException as error:
                raised.append(error)
                raise

    task = asyncio.ensure_future(process())
    port = await mesh.port
    async with open_channel(f"127.0.0.1:{port}", caller="facade", state_dir=tmp_path) as channel:
        chat = llm_pb2_grpc.LlmServiceStub(channel).Chat(llm_pb2.ChatRequest())
        await chat.read()
        go.set()
        with pytest.raises(grpc.aio.AioRpcError):
            await chat.read()
        with pytest.raises(OwnedTaskCrashed, match="printer"):
            await task
    assert isinstance(raised[0], OwnedTaskCrashed)
    assert mesh.llm.cancelled.is_set()


async def test_a_crash_of_an_owner_that_belongs_to_another_task_ends_serve_too(tmp_path):
    mesh, ready = Mesh(tmp_path), asyncio.Event()

    async def crash():
        await mesh.port
        raise RuntimeError("out of paper")

    owner = Owner()

    async def hold():
        async with owner:
            owner.start(crash(), name="printer")
            ready.set()
            await asyncio.Event().wait()

    holder = asyncio.ensure_future(hold())
    await ready.wait()
    with pytest.raises(OwnedTaskCrashed, match="printer"):
        await mesh.serve(owner)
    with pytest.raises(OwnedTaskCrashed):
        await holder


async def test_a_port_that_is_taken_is_refused_by_its_address(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=address):
            await _start_on(tmp_path, address)


async def test_two_servers_never_share_a_port(tmp_path):
    mesh = Mesh(tmp_path)
    async with mesh.serving():
        address = f"127.0.0.1:{mesh.port.result()}"
        with pytest.raises(OSError, match=address):
            await _start_on(tmp_path, address)


async def _start_on(state_dir, address):
    mesh = Mesh(state_dir)
    async with running_server(
        name="llm", settings=mesh.settings, register=mesh.register, service_names=[LLM], listen=address
    ):
        pytest.fail("the server started")


SERVICE = textwrap.dedent("""
    import asyncio, os, sys
    from omniserve.llm.v1 import llm_pb2, llm_pb2_grpc
    from services.kit.run import run
    from services.kit.server import serve
    from services.kit.settings import MeshSettings, SettingsError, knob

    class Settings(MeshSettings):
        service = "llm"
        crash: bool = knob(False, "Crash soon.")
        paper: str = knob("A4", "What it prints on.")

    class Llm(llm_pb2_grpc.LlmServiceServicer):
        async def Chat(self, request, context):
            yield llm_pb2.ChatResponse(prefill=llm_pb2.Prefill())
            try:
                await asyncio.Event().wait()
            finally:
                print("chat ended", flush=True)

    async def crash():
        raise RuntimeError("out of paper")

    async def goodbye():
        print("goodbye", flush=True)

    async def main(settings, owner):
        if settings.paper == "none":
            raise SettingsError(["OMNISERVE_LLM_PAPER: there is none"])

        def started(port):
            print(port, flush=True)
            if settings.crash:
                owner.start(crash(), name="printer")

        await serve(
            name="llm", settings=settings, listen="127.0.0.1:0", owner=owner, on_drain=goodbye, started=started,
            register=lambda server: llm_pb2_grpc.add_LlmServiceServicer_to_server(Llm(), server),
            service_names=["omniserve.llm.v1.LlmService"],
        )
        print("drained", flush=True)

    run(Settings, main)
""")


@pytest.fixture
def start(tmp_path):
    """Start the service as a process of its own, with variables."""
    script = tmp_path / "service.py"
    script.write_text(SERVICE)
    processes = []

    def begin(**variables):
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMNISERVE_", "OTEL_"))}
        paths = os.pathsep.join([str(ROOT), str(ROOT / "protos" / "gen")])
        environ = {**clean, "PYTHONPATH": paths, "OMNISERVE_STATE_DIR": str(tmp_path), **variables}
        process = subprocess.Popen(
            [sys.executable, str(script)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


async def _chatting(process, state_dir):
    port = int(await asyncio.to_thread(process.stdout.readline))
    channel = open_channel(f"127.0.0.1:{port}", caller="facade", state_dir=state_dir)
    chat = llm_pb2_grpc.LlmServiceStub(channel).Chat(llm_pb2.ChatRequest())
    await chat.read()
    return channel, chat


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_signal_drains_an_open_stream_and_ends_with_status_zero(start, tmp_path, number):
    process = start(OMNISERVE_DRAIN_GRACE_S="0.2")
    channel, chat = await _chatting(process, tmp_path)
    process.send_signal(number)
    with pytest.raises(grpc.aio.AioRpcError):
        await chat.read()
    out, _ = await asyncio.to_thread(process.communicate)
    assert out.split("\n") == ["goodbye", "chat ended", "drained", ""]
    assert process.returncode == 0
    await channel.close()


async def test_a_second_signal_ends_the_waiting(start, tmp_path):
    process = start(OMNISERVE_DRAIN_GRACE_S="3600")
    channel, chat = await _chatting(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.stdout.readline) == "goodbye\n"
    process.send_signal(signal.SIGTERM)
    with pytest.raises(grpc.aio.AioRpcError):
        await chat.read()
    out, _ = await asyncio.to_thread(process.communicate)
    assert out == "chat ended\ndrained\n"
    assert process.returncode == 0
    await channel.close()


async def test_a_crashed_task_ends_the_process_with_a_non_zero_status_and_its_stack_in_the_log(start):
    process = start(OMNISERVE_LLM_CRASH="1")
    out, err = await asyncio.to_thread(process.communicate)
    assert process.returncode == 1
    assert "drained" not in out
    assert "out of paper" in err
    assert '"task": "printer"' in err


async def test_bad_settings_end_the_process_with_a_sentence_for_each(start):
    process = start(OMNISERVE_LLM_CRASHH="1", OMNISERVE_DRAIN_GRACE_S="soon")
    _, err = await asyncio.to_thread(process.communicate)
    assert process.returncode == 2
    assert "OMNISERVE_LLM_CRASHH: no such setting; did you mean OMNISERVE_LLM_CRASH?" in err
    assert "OMNISERVE_DRAIN_GRACE_S: 'soon'" in err
    assert "Traceback" not in err


async def test_settings_that_turn_out_bad_in_use_end_the_process_the_same_way(start):
    process = start(OMNISERVE_LLM_PAPER="none")
    _, err = await asyncio.to_thread(process.communicate)
    assert process.returncode == 2
    assert err == "llm: OMNISERVE_LLM_PAPER: there is none\n"
