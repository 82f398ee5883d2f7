"""LoRA adapters per request, on a part of the real model with adapters made of chance."""

import asyncio

import grpc
import pytest
import yaml

from omniserve.llm.v1 import llm_pb2 as pb
from omniserve.llm.v1 import llm_pb2_grpc
from services.kit.errors import Reason, from_rpc_error
from tests.fixtures.gguf_files import lora

PROMPT = (
    "The old lighthouse keeper looked out over the sea and said that the storm would come before the evening, because"
)


def request(*adapters: tuple[str, float], max_tokens: int = 12, **options) -> pb.CompleteRequest:
    return pb.CompleteRequest(
        prompt=pb.Prompt(text=PROMPT),
        options=pb.Options(
            sampling=pb.Sampling(temperature=0),
            limits=pb.Limits(max_tokens=max_tokens, ignore_eos=True),
            adapters=[pb.Adapter(name=name, scale=scale) for name, scale in adapters],
            **options,
        ),
    )


async def answer(stub, asked: pb.CompleteRequest) -> tuple[str, pb.Usage]:
    events = [event async for event in stub.Complete(asked, timeout=100)]
    return "".join(c.text for e in events if e.HasField("output") for c in e.output.choices), events[-1].done.usage


@pytest.fixture(scope="module")
def pair(start_llm, draft_gguf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    loras = {name: str(lora(draft_gguf, folder / f"{name}.gguf", seed=n)) for n, name in enumerate(("one", "two"))}
    model = {"name": "m", "path": str(draft_gguf), "ctx": 4096, "preload": True, "loras": loras}
    (folder / "omniserve.yaml").write_text(yaml.safe_dump({"models": [model]}))
    with start_llm(OMNISERVE_CONFIG=str(folder / "omniserve.yaml")) as running:
        yield running


@pytest.fixture
async def stub(pair):
    async with pair.channel() as channel:
        yield llm_pb2_grpc.LlmServiceStub(channel)
    await pair.idle()


async def test_each_adapter_changes_the_answer_and_strength_zero_does_not(stub):
    base, _ = await answer(stub, request(cache_prompt=False))
    one, _ = await answer(stub, request(("one", 1.0), cache_prompt=False))
    two, _ = await answer(stub, request(("two", 1.0), cache_prompt=False))
    assert len({base, one, two}) == 3
    assert (await answer(stub, request(("one", 0.0), cache_prompt=False)))[0] == base
    assert (await answer(stub, request(("0", 1.0), cache_prompt=False)))[0] == one
    assert (await answer(stub, request(cache_prompt=False)))[0] == base, "nothing of it stays"


async def test_a_warm_prefix_is_used_with_the_same_adapters_only(stub):
    for adapters in ((), (("one", 1.0),), (("one", 0.5),), (("one", 1.0), ("two", 1.0))):
        first = (await answer(stub, request(*adapters)))[1]
        again = (await answer(stub, request(*adapters)))[1]
        assert first.cached_tokens == 0, adapters
        assert again.cached_tokens == again.prompt_tokens - 1


async def test_requests_with_different_adapters_at_once_answer_as_they_would_alone(stub):
    sets = [(), (("one", 1.0),), (("two", 1.0),)]
    alone = [(await answer(stub, request(*each, cache_prompt=False)))[0] for each in sets]
    asked = [request(*each, cache_prompt=False) for _ in range(4) for each in sets]
    together = await asyncio.gather(*(answer(stub, each) for each in asked))
    for place, (text, usage) in enumerate(together):
        # The shape of a batch may turn a near tie; the beginning shows whose weights were used.
        assert text[:8] == alone[place % 3][:8]
        assert usage.completion_tokens == 12


async def test_the_catalogue_lists_the_adapters_in_their_order(stub):
    (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert list(model.adapters) == ["one", "two"]


async def test_an_adapter_that_the_model_has_not_is_refused_by_name(stub):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(stub, request(("three", 1.0)))
    error = from_rpc_error(caught.value)
    assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "options.adapters[0].name")
    assert "'one', 'two'" in error.message
