"""A real facade over real gRPC, with an llm and an admission that do what the test says."""
# ruff: noqa: N802 - servicers have the contracts' names

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import jsonschema
import orjson
import pytest
import pytest_asyncio
import yaml

from facade.server import Running, running_facade
from facade.settings import FacadeSettings
from omniserve.admission.v1 import admission_pb2, admission_pb2_grpc
from omniserve.diffusion.v1 import diffusion_pb2_grpc
from omniserve.llm.v1 import llm_pb2, llm_pb2_grpc
from omniserve.vram.v1 import vram_pb2, vram_pb2_grpc
from services.jobs.adapters.journal import open_journal
from services.jobs.build import open_pictures
from services.jobs.service import SERVICES as JOBS_SERVICES
from services.jobs.service import JobsStoreServicer, registration
from services.jobs.settings import JobsSettings
from services.kit.access import caller_of
from services.kit.clock import SystemClock
from services.kit.errors import DomainError, Reason
from services.kit.health import HealthHandle
from services.kit.server import running_server
from services.kit.settings import MeshSettings
from services.kit.tokens import ensure_token
from tests.fixtures.pictures import ScriptedDiffusion, ScriptedDiffusionAdmin

MODEL = llm_pb2.Model(
    name="tiny", aliases=["tiny-alias", "org/tiny"], kind=llm_pb2.MODEL_KIND_CHAT, context_tokens=64, created_unix_s=7
)
SPEC = Path(
    os.environ.get("OMNISERVE_CONFORMANCE_SPEC")
    or Path(__file__).resolve().parents[4] / "shared" / "conformance" / "openai-openapi.yaml"
)
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


class PeerSettings(MeshSettings):
    service = "peer"


@dataclass
class Started:
    """A generation that the facade began; the test says what happens to it."""

    start: llm_pb2.StartGeneration
    outgoing: "asyncio.Queue[llm_pb2.GenerateSessionResponse | None]"
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, **events: object) -> None:
        """Send events, each as a field of GenerationEvent."""
        said = [llm_pb2.GenerationEvent(request=self.start.request, **{name: each}) for name, each in events.items()]
        self.outgoing.put_nowait(llm_pb2.GenerateSessionResponse(events=said))

    def text(self, text: str, **delta: object) -> None:
        """Say that a choice gained text."""
        self.say(output=llm_pb2.Output(choices=[llm_pb2.ChoiceDelta(text=text, tokens=1, **delta)]))

    def finish(self, reason: int = llm_pb2.FINISH_REASON_STOP, choices: int = 1) -> None:
        """End every choice and the generation."""
        ends = [llm_pb2.ChoiceDelta(index=index, finish_reason=reason) for index in range(choices)]
        usage = llm_pb2.Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=3)
        self.say(output=llm_pb2.Output(choices=ends), done=llm_pb2.Done(usage=usage, model="tiny"))

    def refuse(self, error: DomainError) -> None:
        """End the generation with an error."""
        failed = llm_pb2.Failed(
            code=error.code.value[0],
            reason=error.reason.value,
            message=error.message,
            field=error.field,
            retry_after_ms=error.retry_after_ms,
        )
        self.say(failed=failed)

    def break_stream(self) -> None:
        """Break the stream of all generations, as a crash would."""
        self.outgoing.put_nowait(None)


class ScriptedLlm(llm_pb2_grpc.LlmServiceServicer):
    def __init__(self) -> None:
        self._started: asyncio.Queue[Started] = asyncio.Queue()
        self.running: dict[int, Started] = {}
        self.sessions = 0
        self.ended: set[int] = set()
        self.hang = asyncio.Event()
        self.hang.set()
        self.callers: list[tuple[str, str, str]] = []
        self.close_sessions = asyncio.Event()
        self.engine = llm_pb2.EngineStatus(model="tiny", slots=4)
        self.embedded: list[llm_pb2.EmbedRequest] = []
        self.left = asyncio.Event()

    async def started(self) -> Started:
        """Wait for the next generation."""
        async with asyncio.timeout(20):
            return await self._started.get()

    async def GenerateSession(self, request_iterator, context):
        self.sessions += 1
        self.callers.append((caller_of(context).service, "session", ""))
        outgoing: asyncio.Queue[llm_pb2.GenerateSessionResponse | None] = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(request_iterator, outgoing))
            while (message := await outgoing.get()) is not None:
                await context.write(message)
            reader.cancel()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "recvmsg: connection reset by 10.0.0.1")

    async def _read(self, requests, outgoing):
        async for message in requests:
            if message.HasField("cancel"):
                self.running[message.cancel.request].cancelled.set()
                continue
            started = Started(message.start, outgoing)
            self.running[message.start.request] = started
            self._started.put_nowait(started)

    async def ListModels(self, request, context):
        caller = caller_of(context)
        self.callers.append((caller.service, caller.client, caller.tier))
        return llm_pb2.ListModelsResponse(models=[MODEL])

    async def Tokenize(self, request, context):
        if request.model not in ("", "tiny"):
            raise DomainError(Reason.NOT_FOUND, f"there is no model {request.model!r}", field="model")
        text = request.text or "".join(part.text for m in request.chat.messages for part in m.content)
        raw = text.encode()
        prompt = text if request.HasField("chat") else None
        return llm_pb2.TokenizeResponse(
            tokens=list(raw), pieces=[bytes([each]) for each in raw], context_tokens=64, prompt=prompt
        )

    async def Detokenize(self, request, context):
        if any(token > 255 for token in request.tokens):
            raise DomainError(
                Reason.INVALID_REQUEST, "'tokens[0]' is 999; the vocabulary has 0 to 255", field="tokens[0]"
            )
        return llm_pb2.DetokenizeResponse(text=bytes(request.tokens).decode("utf-8", "replace"))

    async def Embed(self, request, context):
        """Answer each text's length and a half; a text `hang` waits until its caller leaves."""
        self.embedded.append(request)
        caller = caller_of(context)
        self.callers.append((caller.service, caller.client, caller.tier))
        for place, each in enumerate(request.inputs):
            if each.text == "hang":
                try:
                    await asyncio.Event().wait()
                finally:
                    self.left.set()
            if len(each.text) > 64:
                raise DomainError(
                    Reason.CONTEXT_LENGTH_EXCEEDED, f"'inputs[{place}]' has 99 tokens of 64", field=f"inputs[{place}]"
                )
        if request.dimensions > 2:
            raise DomainError(Reason.INVALID_REQUEST, "'dimensions' is larger than 2", field="dimensions")
        vectors = [llm_pb2.Vector(values=[len(each.text), 0.5]) for each in request.inputs]
        return llm_pb2.EmbedResponse(vectors=vectors, prompt_tokens=7, model="tiny")

    async def Rerank(self, request, context):
        scored = sorted(enumerate(map(len, request.documents)), key=lambda each: -each[1])
        results = [llm_pb2.RankedDocument(index=index, score=score) for index, score in scored]
        return llm_pb2.RerankResponse(results=results[: request.top_n or None], prompt_tokens=7, model="tiny")

    async def GetStatus(self, request, context):
        await self.hang.wait()
        return llm_pb2.GetStatusResponse(engines=[self.engine])


class ScriptedLlmAdmin(llm_pb2_grpc.LlmAdminServiceServicer):
    """Notes what it is told and obeys, or refuses with `refusal`."""

    def __init__(self) -> None:
        self.orders: list[object] = []
        self.refusal: DomainError | None = None

    def _obey(self, order: object) -> llm_pb2.Model:
        self.orders.append(order)
        if self.refusal is not None:
            raise self.refusal
        return MODEL

    async def LoadModel(self, request, context):
        return llm_pb2.LoadModelResponse(model=self._obey(request))

    async def UnloadModel(self, request, context):
        return llm_pb2.UnloadModelResponse(model=self._obey(request))

    async def SwapModel(self, request, context):
        return llm_pb2.SwapModelResponse(model=self._obey(request))


class ScriptedAdmission(admission_pb2_grpc.AdmissionServiceServicer):
    async def GetStatus(self, request, context):
        return admission_pb2.GetStatusResponse(epoch=3, pools=[admission_pb2.PoolStatus(name="gpu0", slots=4)])


class ScriptedAdmissionAdmin(admission_pb2_grpc.AdmissionAdminServiceServicer):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    async def Hold(self, request, context):
        self.asked.append(request)
        if request.pool == "gpu7":
            raise DomainError(Reason.NOT_FOUND, "no pool 'gpu7'; there are cpu, gpu0", field="pool")
        return admission_pb2.HoldResponse(hold_id=request.hold_id or "hold-1", drained=False, in_flight=2)

    async def ReleaseHold(self, request, context):
        self.asked.append(request)
        return admission_pb2.ReleaseHoldResponse(released=True)


class ScriptedVram(vram_pb2_grpc.VramServiceServicer):
    """Answers what the test says and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.callers: list[tuple[str, str, str]] = []
        self.answer: object = None
        self.leaving = asyncio.Event()

    async def _answered(self, request, context, default):
        caller = caller_of(context)
        self.asked.append(request)
        self.callers.append((caller.service, caller.client, caller.tier))
        if isinstance(self.answer, DomainError):
            raise self.answer
        return default if self.answer is None else self.answer

    async def Lease(self, request, context):
        if request.purpose == "wait":
            self.asked.append(request)
            try:
                await asyncio.sleep(3600)
            finally:
                self.leaving.set()
        return await self._answered(request, context, vram_pb2.LeaseResponse())

    async def Renew(self, request, context):
        return await self._answered(request, context, vram_pb2.RenewResponse())

    async def Release(self, request, context):
        return await self._answered(request, context, vram_pb2.ReleaseResponse(released=True))

    async def GetState(self, request, context):
        return await self._answered(request, context, vram_pb2.GetStateResponse(enabled=True))

    async def GetHostMemory(self, request, context):
        return await self._answered(request, context, vram_pb2.GetHostMemoryResponse(total_mib=9))


@dataclass
class Mesh:
    """A facade and what is behind it."""

    running: Running
    llm: ScriptedLlm
    llm_admin: ScriptedLlmAdmin
    llm_health: HealthHandle
    llm_port: int
    http: httpx.AsyncClient
    state_dir: Path
    vram: ScriptedVram
    stop_llm: Callable[[], "asyncio.Future[None]"]
    start_llm: Callable[[], "asyncio.Future[None]"]
    stop_jobs: Callable[[], "asyncio.Future[None]"]
    admission_admin: ScriptedAdmissionAdmin
    diffusion: ScriptedDiffusion
    diffusion_admin: ScriptedDiffusionAdmin

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.running.port}"

    def token(self, name: str) -> dict[str, str]:
        return {"x-omniserve-service-token": ensure_token(self.state_dir, name)}


class LlmProcess:
    """The llm server; may be stopped and started again on its port."""

    def __init__(self, settings: PeerSettings, servicer: ScriptedLlm, admin: ScriptedLlmAdmin, port: int) -> None:
        self._settings = settings
        self._servicer = servicer
        self._admin = admin
        self._stack = AsyncExitStack()
        self.port = port
        self.health = HealthHandle()

    async def start(self) -> None:
        self.health = HealthHandle()
        await self._stack.enter_async_context(
            running_server(
                name="llm",
                settings=self._settings,
                register=self._register,
                service_names=("omniserve.llm.v1.LlmService", "omniserve.llm.v1.LlmAdminService"),
                listen=f"127.0.0.1:{self.port}",
                health=self.health,
            )
        )

    def _register(self, server: grpc.aio.Server) -> None:
        llm_pb2_grpc.add_LlmServiceServicer_to_server(self._servicer, server)
        llm_pb2_grpc.add_LlmAdminServiceServicer_to_server(self._admin, server)

    async def stop(self) -> None:
        await self._stack.aclose()


async def _start_jobs(stack: AsyncExitStack, state_dir: Path) -> int:
    """Serve the real jobs for the length of the stack; return its port."""
    settings = JobsSettings(state_dir=state_dir, drain_grace_s=0.05)
    journal = await stack.enter_async_context(open_journal(state_dir / "jobs" / "journal.sqlite"))
    pictures = open_pictures(settings, journal, SystemClock())
    servicer = JobsStoreServicer(journal, SystemClock(), settings.bounds(), pictures)
    server = running_server(
        name="jobs", settings=settings, register=registration(servicer), service_names=JOBS_SERVICES
    )
    return await stack.enter_async_context(server)


@asynccontextmanager
async def _mesh(state_dir: Path, llm_port: int, **overrides: object) -> AsyncIterator[Mesh]:
    peers = PeerSettings(state_dir=state_dir, drain_grace_s=0.05)
    servicer, admin = ScriptedLlm(), ScriptedLlmAdmin()
    llm = LlmProcess(peers, servicer, admin, llm_port)
    admission_admin = ScriptedAdmissionAdmin()

    def register_admission(server: grpc.aio.Server) -> None:
        admission_pb2_grpc.add_AdmissionServiceServicer_to_server(ScriptedAdmission(), server)
        admission_pb2_grpc.add_AdmissionAdminServiceServicer_to_server(admission_admin, server)

    admission = running_server(
        name="admission",
        settings=peers,
        register=register_admission,
        service_names=("omniserve.admission.v1.AdmissionService", "omniserve.admission.v1.AdmissionAdminService"),
    )
    scripted_vram = ScriptedVram()
    vram = running_server(
        name="vram",
        settings=peers,
        register=lambda server: vram_pb2_grpc.add_VramServiceServicer_to_server(scripted_vram, server),
        service_names=("omniserve.vram.v1.VramService",),
    )
    scripted_diffusion, diffusion_admin = ScriptedDiffusion(), ScriptedDiffusionAdmin()

    def register_diffusion(server: grpc.aio.Server) -> None:
        diffusion_pb2_grpc.add_DiffusionServiceServicer_to_server(scripted_diffusion, server)
        diffusion_pb2_grpc.add_DiffusionAdminServiceServicer_to_server(diffusion_admin, server)

    diffusion = running_server(
        name="diffusion",
        settings=peers,
        register=register_diffusion,
        service_names=("omniserve.diffusion.v1.DiffusionService", "omniserve.diffusion.v1.DiffusionAdminService"),
    )
    async with AsyncExitStack() as stack:
        diffusion_port = await stack.enter_async_context(diffusion)
        vram_port = await stack.enter_async_context(vram)
        jobs = await stack.enter_async_context(AsyncExitStack())
        jobs_port = await _start_jobs(jobs, state_dir)
        admission_port = await stack.enter_async_context(admission)
        await llm.start()
        stack.push_async_callback(llm.stop)
        settings = FacadeSettings(
            **{
                "state_dir": state_dir,
                "listen": "127.0.0.1:0",
                "llm_address": f"127.0.0.1:{llm.port}",
                "jobs_address": f"127.0.0.1:{jobs_port}",
                "admission_address": f"127.0.0.1:{admission_port}",
                "vram_address": f"127.0.0.1:{vram_port}",
                "diffusion_address": f"127.0.0.1:{diffusion_port}",
                "drain_grace_s": 0.3,
                "comment_every_s": 0.05,
                "peer_wait_s": 20,
                "status_budget_s": 20,
                **overrides,
            }
        )
        running = await stack.enter_async_context(running_facade(settings))
        token = ensure_token(state_dir, "envoy-public")
        http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{running.port}", headers={"x-omniserve-service-token": token}, timeout=30
        )
        await stack.enter_async_context(http)
        yield Mesh(
            running,
            servicer,
            admin,
            llm.health,
            llm.port,
            http,
            state_dir,
            scripted_vram,
            llm.stop,
            llm.start,
            jobs.aclose,
            admission_admin,
            scripted_diffusion,
            diffusion_admin,
        )


@pytest.fixture
def open_mesh(tmp_path: Path, free_ports: Callable[[int], list[int]]):
    """Return `open_mesh(**settings)`, a context manager that gives a Mesh."""
    return lambda **overrides: _mesh(tmp_path, free_ports(1)[0], **overrides)


@pytest.fixture
async def mesh(tmp_path: Path, free_ports: Callable[[int], list[int]]) -> AsyncIterator[Mesh]:
    """A facade over a scripted llm and admission."""
    async with _mesh(tmp_path, free_ports(1)[0]) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_mesh(
    tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], list[int]]
) -> AsyncIterator[Mesh]:
    """One for all tests of a file whose requests get no further than the facade: they run in the module's event loop."""
    async with _mesh(tmp_path_factory.mktemp("facade"), free_ports(1)[0]) as opened:
        yield opened


class Reading:
    """A streamed answer that is being read."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.lines = response.aiter_lines()

    async def next(self) -> str:
        """Wait for the next line that is not empty."""
        async with asyncio.timeout(20):
            while not (line := await anext(self.lines)):
                pass
            return line

    async def data(self):
        """Wait for the next event, past comments, as an object; "[DONE]" as text."""
        while not (line := await self.next()).startswith("data: "):
            pass
        text = line.removeprefix("data: ")
        return text if text == "[DONE]" else orjson.loads(text)

    async def rest(self) -> list:
        """Return all events to the end."""
        events = []
        try:
            while True:
                events.append(await self.data())
        except StopAsyncIteration:
            return events


@pytest.fixture
def chat(mesh):
    """Return `chat(**fields)`: a task that posts a chat and returns the response."""

    def post(**fields: object) -> "asyncio.Task[httpx.Response]":
        return asyncio.ensure_future(mesh.http.post("/v1/chat/completions", json={**HELLO, **fields}))

    return post


@pytest.fixture
def read_stream():
    """Return `read_stream(mesh, path=..., **fields)`: a context manager that gives a Reading once headers are there."""

    @asynccontextmanager
    async def opened(mesh: Mesh, path: str = "/v1/chat/completions", **fields: object) -> AsyncIterator[Reading]:
        body = {**({} if "prompt" in fields else HELLO), "stream": True, **fields}
        async with mesh.http.stream("POST", path, json=body) as response:
            yield Reading(response)

    return opened


def nullable(schema):
    """Return the schema with OpenAPI 3.0's `nullable`, which the file still uses here and there, as a type."""
    if isinstance(schema, list):
        return [nullable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {name: nullable(each) for name, each in schema.items()}
    if changed.pop("nullable", False) is True:
        return {"anyOf": [changed, {"type": "null"}]}
    return changed


@pytest.fixture(scope="session")
def components():
    if not SPEC.exists():
        pytest.skip(f"{SPEC} is not there; OMNISERVE_CONFORMANCE_SPEC names OpenAI's API description")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return nullable(yaml.load(SPEC.read_text(), Loader=loader)["components"])  # noqa: S506 - a safe loader


@pytest.fixture(scope="session")
def check_openai(components):
    """Return `check_openai(name, value)`: it must conform to OpenAI's description of its API."""

    def validate(name: str, value: object) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": components}
        jsonschema.Draft202012Validator(schema).validate(value)

    return validate
