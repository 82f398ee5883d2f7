"""Several models in one service: loaded when asked for, making room for each other, changed while others run."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import yaml

from omniserve.llm.v1 import llm_pb2 as pb
from omniserve.llm.v1 import llm_pb2_grpc
from services.kit.errors import DomainError, Reason, from_rpc_error
from services.llm.adapters.model_file import default_path

# big and twin take 115 MiB each, draft 54: draft fits beside either, big and twin do not fit together.
MEMORY_MIB = 200
CLIENTS = int(os.environ.get("OMNISERVE_CHAOS_CLIENTS", "8"))
"""Callers that alternate between two models; `make chaos` has more of them."""
BIG = {"name": "big", "path": str(default_path()), "ctx": 1024, "aliases": ["gpt-4o"], "preload": True}
TWIN = {"name": "twin", "path": str(default_path()), "ctx": 1024, "system": "Answer questions correctly."}


@dataclass
class Shelf:
    """A service with several models. `file`: its omniserve.yaml; `swaps`: the folder to swap from."""

    pair: object
    file: Path
    swaps: Path
    models: list[dict]

    def write(self, models: list[dict]) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text(yaml.safe_dump({"models": models}))
        fresh.rename(self.file)

    @asynccontextmanager
    async def stubs(self):
        async with self.pair.channel() as channel:
            yield llm_pb2_grpc.LlmServiceStub(channel), llm_pb2_grpc.LlmAdminServiceStub(channel)

    async def models_now(self) -> dict[str, pb.Model]:
        async with self.stubs() as (stub, _):
            return {model.name: model for model in (await stub.ListModels(pb.ListModelsRequest())).models}

    async def state(self, name: str) -> int:
        return (await self.models_now())[name].state

    async def until(self, condition, what: str) -> None:
        async with asyncio.timeout(200):
            while not await condition():
                await asyncio.sleep(0.02)

    def loads(self) -> int:
        return self.pair.log.read_text().count("memory charged")


def chat(model: str, text: str = "What is the capital of France?", *, max_tokens: int = 2) -> pb.ChatRequest:
    return pb.ChatRequest(
        model=model,
        messages=[pb.Message(role="user", content=[pb.ContentPart(text=text)])],
        options=pb.Options(
            sampling=pb.Sampling(temperature=0), limits=pb.Limits(max_tokens=max_tokens, ignore_eos=True)
        ),
    )


async def events_of(stub, request: pb.ChatRequest) -> list[pb.ChatResponse]:
    return [event async for event in stub.Chat(request, timeout=280)]


async def begun(stub, model: str, *, max_tokens: int = 900):
    """Return a long answer that has begun."""
    call = stub.Chat(chat(model, "Tell a long story.", max_tokens=max_tokens))
    async for event in call:
        if event.HasField("output"):
            return call
    raise AssertionError("it ended before it began")


async def refused(call) -> DomainError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


@pytest.fixture(scope="module")
def shelf(start_llm, draft_gguf, tmp_path_factory) -> Iterator[Shelf]:
    folder = tmp_path_factory.mktemp("shelf")
    swaps = folder / "swaps"
    swaps.mkdir()
    draft = {"name": "draft", "path": str(draft_gguf), "ctx": 1024}
    shelf = Shelf(None, folder / "omniserve.yaml", swaps, [BIG, TWIN, draft])
    shelf.write(shelf.models)
    with start_llm(
        OMNISERVE_CONFIG=str(shelf.file),
        OMNISERVE_LLM_MEMORY_MIB=str(MEMORY_MIB),
        OMNISERVE_LLM_TURN_S="2",
        OMNISERVE_LLM_LOAD_WAIT_S="250",  # a load takes a second here, and half a minute on a crowded machine
        OMNISERVE_LLM_SWAP_DIR=str(swaps),
    ) as pair:
        shelf.pair = pair
        yield shelf


async def test_only_what_is_preloaded_is_in_memory_and_all_are_listed(shelf):
    models = await shelf.models_now()
    assert list(models) == ["big", "twin", "draft"]
    assert [model.state for model in models.values()] == [
        pb.MODEL_STATE_READY,
        pb.MODEL_STATE_AVAILABLE,
        pb.MODEL_STATE_AVAILABLE,
    ]
    assert models["big"].memory_mib + models["draft"].memory_mib <= MEMORY_MIB < 2 * models["big"].memory_mib
    assert models["draft"].size_mib < models["big"].size_mib
    assert list(await shelf.pair.engines()) == ["big"]


async def test_a_request_for_a_cold_model_loads_it_and_is_told_so_meanwhile(shelf):
    async with shelf.stubs() as (stub, _):
        events = await events_of(stub, chat("draft"))
        assert events[0].HasField("loading")
        assert events[0].loading.model == "draft"
        assert events[-1].done.model == "draft"
        assert {"big", "draft"} == set(await shelf.pair.engines()), "it fits beside the other"
        assert not any(event.HasField("loading") for event in await events_of(stub, chat("draft")))
        assert (await events_of(stub, chat("gpt-4o")))[-1].done.model == "big"
    await shelf.pair.idle()


async def test_tokenizing_needs_no_load(shelf):
    async with shelf.stubs() as (stub, _):
        answer = await stub.Tokenize(pb.TokenizeRequest(model="twin", text="hello"), timeout=60)
        assert b"".join(answer.pieces) == b"hello"
        assert answer.context_tokens == 1024
        assert await shelf.state("twin") == pb.MODEL_STATE_AVAILABLE
        error = await refused(stub.Tokenize(pb.TokenizeRequest(model="nobody", text="hello")))
        assert (error.reason, error.field) == (Reason.NOT_FOUND, "model")
        assert "'big', 'twin', 'draft' are served" in error.message


async def test_a_prompt_that_can_never_fit_is_refused_before_anything_is_loaded(shelf):
    async with shelf.stubs() as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await events_of(stub, chat("twin", "word " * 2000))
        assert from_rpc_error(caught.value).reason is Reason.CONTEXT_LENGTH_EXCEEDED
        assert await shelf.state("twin") == pb.MODEL_STATE_AVAILABLE


async def test_requests_alternating_over_two_models_that_do_not_fit_are_all_served_with_few_loads(shelf):
    before = shelf.loads()
    served: list[str] = []

    async def client(stub, number: int) -> None:
        for turn in range(5):
            model = ("big", "twin")[(number + turn) % 2]
            served.append((await events_of(stub, chat(model)))[-1].done.model)
            assert served[-1] == model

    async with shelf.stubs() as (stub, _), asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(stub, number))
    assert len(served) == 5 * CLIENTS
    assert shelf.loads() - before <= 20
    await shelf.pair.idle()


async def test_who_waits_for_a_model_keeps_nobody_else_waiting(shelf):
    async with shelf.stubs() as (stub, _):
        await events_of(stub, chat("draft"))
        story = await begun(stub, "big")
        waiting = [stub.Chat(chat("twin")) for _ in range(20)]  # more than there are slots
        for call in waiting:
            async for event in call:
                if event.HasField("loading"):
                    break
        for _ in range(3):
            assert (await events_of(stub, chat("draft")))[-1].done.model == "draft"
        assert await shelf.state("twin") == pb.MODEL_STATE_AVAILABLE
        story.cancel()
        for call in waiting:
            assert [event async for event in call][-1].done.model == "twin"
    await shelf.pair.idle()


async def test_a_host_killed_while_it_loads_is_started_again_and_the_request_served(shelf):
    async with shelf.stubs() as (stub, admin):
        await admin.UnloadModel(pb.UnloadModelRequest(model="twin"))
        asked = asyncio.create_task(events_of(stub, chat("twin")))

        async def killed() -> bool:
            engine = (await shelf.pair.engines()).get("twin")
            if engine is None or engine.state != pb.MODEL_STATE_LOADING or not engine.host_pid:
                return False
            os.kill(engine.host_pid, signal.SIGKILL)
            return True

        await shelf.until(killed, "its host was killed")
        assert (await asked)[-1].done.model == "twin"
        assert (await shelf.pair.engines())["twin"].crashes_total == 1
    await shelf.pair.idle()


async def test_an_unload_waits_for_running_answers_and_gives_up_at_its_bound(shelf):
    async with shelf.stubs() as (stub, admin):
        story = await begun(stub, "big")
        error = await refused(admin.UnloadModel(pb.UnloadModelRequest(model="big", wait_ms=50)))
        assert (error.reason, error.code) == (Reason.UPSTREAM_TIMEOUT, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert "1 requests still run" in error.message
        assert await shelf.state("big") == pb.MODEL_STATE_READY
        unload = asyncio.ensure_future(admin.UnloadModel(pb.UnloadModelRequest(model="big", wait_ms=60_000)))
        late = stub.Chat(chat("big"))
        async for event in late:
            assert event.HasField("loading"), "new requests wait"
            break
        async for event in story:
            assert event.HasField("output"), "the running one goes on"
            break
        assert not unload.done()
        story.cancel()
        assert (await unload).model.name == "big"
        assert [event async for event in late][-1].done.model == "big", "and are served after a new load"
        for _ in range(2):
            unloaded = await admin.UnloadModel(pb.UnloadModelRequest(model="big"))
            assert unloaded.model.state == pb.MODEL_STATE_AVAILABLE
    await shelf.pair.idle()


async def test_a_caller_that_leaves_while_it_waits_for_a_load_leaves_nothing(shelf):
    async with shelf.stubs() as (stub, _):
        story = await begun(stub, "big")
        call = stub.Chat(chat("twin"))
        async for event in call:
            if event.HasField("loading"):
                break
        call.cancel()
        assert (await events_of(stub, chat("big")))[-1].done.model == "big", "it stays open for its own requests"
        story.cancel()
    await shelf.pair.idle()


async def test_the_file_s_changes_count_at_once_and_touch_no_running_answer(shelf, draft_gguf):
    async with shelf.stubs() as (stub, _):
        story = await begun(stub, "twin", max_tokens=150)
        newcomer = {"name": "newcomer", "path": str(draft_gguf), "ctx": 512, "ttl_s": 0.5}
        shelf.write([BIG | {"aliases": ["renamed"]}, newcomer])

        async def changed() -> bool:
            return list(await shelf.models_now()) == ["big", "newcomer"]

        await shelf.until(changed, "the newcomer is listed")
        models = await shelf.models_now()
        assert list(models["big"].aliases) == ["renamed"]
        assert models["newcomer"].ttl_ms == 500
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await events_of(stub, chat("twin"))
        assert from_rpc_error(caught.value).reason is Reason.NOT_FOUND
        assert (await events_of(stub, chat("newcomer")))[-1].done.model == "newcomer"
        assert [event async for event in story][-1].done.model == "twin", "what ran on the old one ended well"

        async def unloaded() -> bool:
            return await shelf.state("newcomer") == pb.MODEL_STATE_AVAILABLE

        await shelf.until(unloaded, "the idle newcomer has left memory")
    shelf.write(shelf.models)
    await shelf.pair.idle()


async def test_a_bad_file_is_refused_with_its_line_and_what_was_served_goes_on(shelf):
    await shelf.until(lambda: _listed(shelf, "draft"), "the former models are back")
    shelf.file.write_text("models:\n  - name: big\n    path: x.gguf\n    pinn: true\n")
    shelf.pair.llm.send_signal(signal.SIGHUP)

    async def told() -> bool:
        return "no such setting; did you mean `pin`?" in shelf.pair.log.read_text()

    await shelf.until(told, "the log has the fault")
    assert "omniserve.yaml:4: models[0].pinn" in shelf.pair.log.read_text()
    assert list(await shelf.models_now()) == ["big", "twin", "draft"]
    shelf.write(shelf.models)


async def _listed(shelf: Shelf, name: str) -> bool:
    return name in await shelf.models_now()


async def test_a_swap_serves_the_new_file_under_the_same_name_and_does_nothing_the_second_time(shelf, draft_gguf):
    (shelf.swaps / "small.gguf").write_bytes(draft_gguf.read_bytes())
    async with shelf.stubs() as (stub, admin):
        story = await begun(stub, "big")
        swap = asyncio.ensure_future(
            admin.SwapModel(pb.SwapModelRequest(path="small.gguf", context_tokens=512, slots=4))
        )
        waiting = asyncio.create_task(events_of(stub, chat("big")))
        async for event in story:
            assert event.HasField("output")
            break
        assert not swap.done(), "it waits for running answers"
        story.cancel()
        model = (await swap).model
        assert (model.name, model.state, model.context_tokens) == ("big", pb.MODEL_STATE_READY, 512)
        assert model.size_mib == (await shelf.models_now())["draft"].size_mib
        assert (await waiting)[-1].done.model == "big", "who came meanwhile is served by the new one"
        engine = (await shelf.pair.engines())["big"]
        assert (engine.slots, engine.kv_cells) == (4, 512)
        await admin.SwapModel(pb.SwapModelRequest(path="small.gguf", context_tokens=512, slots=4))
        assert (await shelf.pair.engines())["big"].host_pid == engine.host_pid
    await shelf.pair.idle()


async def test_a_swap_that_cannot_load_restores_the_former_model(shelf, draft_gguf):
    whole = draft_gguf.read_bytes()
    # Whole as a file, with a header that can be read, and still nothing that llama.cpp can load.
    (shelf.swaps / "sick.gguf").write_bytes(whole.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"))
    (shelf.swaps / "short.gguf").write_bytes(whole[: len(whole) // 2])
    async with shelf.stubs() as (stub, admin):
        before = (await shelf.models_now())["big"]
        error = await refused(admin.SwapModel(pb.SwapModelRequest(path="sick.gguf"), timeout=280))
        assert error.reason is Reason.ENGINE_FAILED
        assert "'big' serves again" in error.message
        after = (await shelf.models_now())["big"]
        assert (after.state, after.size_mib) == (pb.MODEL_STATE_READY, before.size_mib)
        assert (await events_of(stub, chat("big")))[-1].done.model == "big"
        pid = (await shelf.pair.engines())["big"].host_pid
        error = await refused(admin.SwapModel(pb.SwapModelRequest(path="short.gguf")))
        assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "path")
        assert "truncated" in error.message
        assert (await shelf.pair.engines())["big"].host_pid == pid, "a bad header is found before anything is unloaded"
    await shelf.pair.idle()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("../omniserve.yaml", Reason.INVALID_REQUEST),
        ("/etc/passwd", Reason.INVALID_REQUEST),
        ("link.gguf", Reason.INVALID_REQUEST),
        ("away/draft.gguf", Reason.INVALID_REQUEST),
        ("", Reason.INVALID_REQUEST),
        ("a\0b", Reason.INVALID_REQUEST),
        ("nothing.gguf", Reason.NOT_FOUND),
        (".", Reason.NOT_FOUND),
        ("text.gguf", Reason.INVALID_REQUEST),
    ],
)
async def test_a_path_that_is_no_model_below_the_folder_is_refused(shelf, draft_gguf, path, reason):
    for name, target in (("link.gguf", draft_gguf), ("away", draft_gguf.parent)):
        if not (shelf.swaps / name).is_symlink():
            (shelf.swaps / name).symlink_to(target)
    (shelf.swaps / "text.gguf").write_text("hello")
    async with shelf.stubs() as (_, admin):
        error = await refused(admin.SwapModel(pb.SwapModelRequest(path=path)))
    assert (error.reason, error.field) == (reason, "path")
    assert str(shelf.swaps) not in error.message or path == "text.gguf"


@pytest.mark.parametrize(("field", "value"), [("context_tokens", 10), ("slots", 0), ("slots", 129)])
async def test_a_swap_s_numbers_are_checked(shelf, draft_gguf, field, value):
    (shelf.swaps / "small.gguf").write_bytes(draft_gguf.read_bytes())
    async with shelf.stubs() as (_, admin):
        error = await refused(admin.SwapModel(pb.SwapModelRequest(path="small.gguf", **{field: value})))
    assert (error.reason, error.field) == (Reason.INVALID_REQUEST, field)
