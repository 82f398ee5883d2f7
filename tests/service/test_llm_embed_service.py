"""Embed and Rerank over real gRPC with a real admission and real models."""

import asyncio
import os
import signal
from pathlib import Path

import gguf
import grpc
import numpy as np
import pytest
import yaml

from omniserve.admission.v1 import admission_pb2, admission_pb2_grpc
from omniserve.llm.v1 import llm_pb2 as pb
from omniserve.llm.v1 import llm_pb2_grpc
from services.kit.channels import open_channel
from services.kit.errors import DomainError, Reason, from_rpc_error
from services.llm.adapters.model_file import default_path
from services.llm.core.embed_wire import Item
from services.llm.host.embed_context import EmbedContext
from services.llm.host.embed_role import Reader
from services.llm.host.llama import Model, start_backend
from services.llm.served import embedding_path
from services.llm.settings import LlmSettings
from tests.fixtures.gguf_files import floats, number, take_apart

NAME = "all-MiniLM-L6-v2"
QUERY = "Which animal sleeps on the sofa?"
DOCUMENTS = ("Shares fell on Monday.", "The cat is asleep on the couch.", "Bread is made of flour.")


def embed(*texts: str, **fields) -> pb.EmbedRequest:
    return pb.EmbedRequest(inputs=[pb.EmbedInput(text=text) for text in texts], **fields)


def rows(answer: pb.EmbedResponse) -> np.ndarray:
    return np.array([vector.values for vector in answer.vectors], np.float32)


async def refusal(call) -> DomainError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


@pytest.fixture(scope="module")
def model_path() -> Path:
    path = embedding_path(LlmSettings())
    assert path is not None, "the default embedding model is missing: run `make setup`"
    return path


@pytest.fixture(scope="module")
def reranker(model_path, tmp_path_factory) -> Path:
    """The default model with a classifier on top: a score is the sum of tanh of the first token's first eight numbers."""
    model = take_apart(model_path)
    model.settings["bert.pooling_type"] = number(gguf.PoolingType.RANK)
    picked = np.zeros((1, 384), np.float32)
    picked[0, :8] = 1
    model.tensors |= {
        "cls.weight": floats(np.eye(384, dtype=np.float32)),
        "cls.bias": floats(np.zeros(384, np.float32)),
        "cls.output.weight": floats(picked),
        "cls.output.bias": floats(np.zeros(1, np.float32)),
    }
    return model.write(tmp_path_factory.mktemp("models") / "tiny-reranker.gguf")


@pytest.fixture(scope="module")
def pair(start_llm, reranker):
    with start_llm(OMNISERVE_EMBEDDING_GGUF="", OMNISERVE_RERANK_GGUF=str(reranker)) as running:
        yield running


@pytest.fixture
async def stub(pair):
    async with pair.channel() as channel:
        yield llm_pb2_grpc.LlmServiceStub(channel)
    await pair.idle()


async def engine(stub, name: str = NAME) -> pb.EngineStatus:
    status = await stub.GetStatus(pb.GetStatusRequest(), timeout=60)
    return next(each for each in status.engines if each.model == name)


async def test_vectors_have_length_one_and_come_in_order_with_their_tokens_counted(stub):
    both = await stub.Embed(embed("a cat", "a dog"), timeout=60)
    one, two = [await stub.Embed(embed(text), timeout=60) for text in ("a cat", "a dog")]
    assert (rows(both) * np.concatenate([rows(one), rows(two)])).sum(axis=1).min() > 0.999
    assert np.allclose(np.linalg.norm(rows(both), axis=1), 1, atol=1e-5)
    assert both.prompt_tokens == one.prompt_tokens + two.prompt_tokens == 8
    assert both.model == NAME


async def test_256_inputs_are_answered_in_order(stub):
    texts = [f"number {place}" for place in range(256)]
    answer = await stub.Embed(embed(*texts), timeout=100)
    some = await stub.Embed(embed(texts[0], texts[100], texts[255]), timeout=60)
    assert len(answer.vectors) == 256
    assert (rows(answer)[[0, 100, 255]] * rows(some)).sum(axis=1).min() > 0.999


async def test_dimensions_are_a_beginning_of_length_one_and_raw_is_as_the_model_made_it(stub):
    whole, cut, raw = [
        rows(await stub.Embed(embed("a cat", **fields), timeout=60))[0]
        for fields in ({}, {"dimensions": 64}, {"raw": True})
    ]
    assert len(cut) == 64
    assert np.allclose(cut, whole[:64] / np.linalg.norm(whole[:64]), atol=1e-5)
    assert abs(np.linalg.norm(raw) - 1) > 0.01
    assert np.allclose(raw / np.linalg.norm(raw), whole, atol=1e-5)


async def test_tokens_are_embedded_as_they_are(stub):
    ids = [101, 1037, 4937, 102]  # [CLS] a cat [SEP]
    request = pb.EmbedRequest(inputs=[pb.EmbedInput(tokens=pb.Tokens(ids=ids))])
    from_tokens, from_text = await stub.Embed(request, timeout=60), await stub.Embed(embed("a cat"), timeout=60)
    assert (rows(from_tokens) * rows(from_text)).sum() > 0.999


async def test_a_long_input_is_refused_with_both_numbers_or_cut_when_asked(stub):
    error = await refusal(stub.Embed(embed("fine", "word " * 600), timeout=60))
    assert error.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert error.field == "inputs[1]"
    assert "602" in error.message
    assert "512" in error.message
    cut = await stub.Embed(embed("word " * 600, truncate=True), timeout=60)
    assert cut.prompt_tokens == 512


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.EmbedRequest(), "inputs"),
        (embed(*["a"] * 257), "inputs"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(text="a"), pb.EmbedInput()]), "inputs[1]"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(tokens=pb.Tokens())]), "inputs[0]"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(tokens=pb.Tokens(ids=[5, 40_000]))]), "inputs[0][1]"),
        (embed("a", dimensions=385), "dimensions"),
        (embed("a", model="no-such-model"), "model"),
        (embed("a", model="tiny-reranker"), "model"),
    ],
)
async def test_what_cannot_be_embedded_is_refused_by_its_field(stub, request_, field):
    error = await refusal(stub.Embed(request_, timeout=60))
    assert error.field == field
    assert error.reason in {Reason.INVALID_REQUEST, Reason.NOT_FOUND}


async def test_an_embedding_takes_a_slot_of_the_cpu_pool_and_none_of_the_device(stub, pair):
    before = await pools(pair)
    await stub.Embed(embed("a"), timeout=60)
    after = await pools(pair)
    assert after["cpu"].max_in_use >= 1
    assert after["gpu0"].max_in_use == before["gpu0"].max_in_use
    assert after["cpu"].in_use == 0


async def pools(pair) -> dict[str, admission_pb2.PoolStatus]:
    async with open_channel(pair.admission_address, caller="facade", state_dir=pair.state_dir) as channel:
        stub = admission_pb2_grpc.AdmissionServiceStub(channel)
        status = await stub.GetStatus(admission_pb2.GetStatusRequest(), timeout=60)
    return {pool.name: pool for pool in status.pools}


async def test_documents_are_ranked_by_cosine_when_an_embedding_model_is_asked(stub):
    request = pb.RerankRequest(model=NAME, query=QUERY, documents=DOCUMENTS)
    answer = await stub.Rerank(request, timeout=60)
    assert answer.results[0].index == 1
    vectors = rows(await stub.Embed(embed(QUERY, *DOCUMENTS), timeout=60))
    cosines = vectors[1:] @ vectors[0]
    assert np.allclose([each.score for each in answer.results], sorted(cosines, reverse=True), atol=1e-4)
    assert all(abs(each.score - cosines[each.index]) < 1e-4 for each in answer.results)
    best = await stub.Rerank(pb.RerankRequest(model=NAME, query=QUERY, documents=DOCUMENTS, top_n=1), timeout=60)
    assert [each.index for each in best.results] == [1]


async def test_a_cross_encoder_is_the_default_for_ranking_and_scores_pairs(stub, model_path):
    answer = await stub.Rerank(pb.RerankRequest(query=QUERY, documents=DOCUMENTS), timeout=60)
    assert answer.model == "tiny-reranker"
    start_backend()
    model = Model.load(str(model_path))
    context = EmbedContext(model, tokens=128, sequences=4, threads=1, pooling="cls", flash=False)
    reader = Reader(model, 128)
    firsts = [
        np.frombuffer(context.compute([reader.tokens(Item(text=document, query=QUERY))])[0], np.float32)
        for document in DOCUMENTS
    ]
    expected = [float(np.tanh(first[:8]).sum()) for first in firsts]
    assert [each.index for each in answer.results] == sorted(range(3), key=lambda place: -expected[place])
    assert all(abs(each.score - expected[each.index]) < 1e-2 for each in answer.results)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.RerankRequest(documents=["a"]), "query"),
        (pb.RerankRequest(query="q"), "documents"),
        (pb.RerankRequest(query="q", documents=["a"] * 1001), "documents"),
        (pb.RerankRequest(query="q", documents=["a"], top_n=0), "top_n"),
        (pb.RerankRequest(query="q", documents=["a", "word " * 600]), "documents[1]"),
        (pb.RerankRequest(model=NAME, query="q", documents=["a", "word " * 600]), "documents[1]"),
        (pb.RerankRequest(model=NAME, query="word " * 600, documents=["a"]), "query"),
        (pb.RerankRequest(model="no-such-model", query="q", documents=["a"]), "model"),
    ],
)
async def test_what_cannot_be_ranked_is_refused_by_its_field(stub, request_, field):
    assert (await refusal(stub.Rerank(request_, timeout=60))).field == field


async def test_the_catalogue_and_the_status_show_the_models(stub):
    models = {model.name: model for model in (await stub.ListModels(pb.ListModelsRequest(), timeout=60)).models}
    assert models[NAME].kind == pb.MODEL_KIND_EMBEDDING
    assert models[NAME].embedding_dimensions == 384
    assert models[NAME].context_tokens == 512
    assert models[NAME].quantisation == "Q8_0"
    assert models["tiny-reranker"].kind == pb.MODEL_KIND_RERANK
    before = await engine(stub)
    await stub.Embed(embed("a cat", "a dog"), timeout=60)
    after = await engine(stub)
    assert after.state == pb.MODEL_STATE_READY
    assert after.prefill_tokens_total == before.prefill_tokens_total + 8
    assert after.requests_total == before.requests_total + 1
    assert after.placement.device == "cpu"
    assert (after.active_sequences, after.waiting_requests) == (0, 0)


async def test_a_caller_who_leaves_ends_the_work_within_a_step(stub):
    cancelled = (await engine(stub)).cancelled_total
    call = stub.Embed(embed(*["many words " * 80] * 200), timeout=100)
    while (await engine(stub)).active_sequences == 0:
        await asyncio.sleep(0.01)
    call.cancel()
    async with asyncio.timeout(60):
        while (now := await engine(stub)).active_sequences or now.cancelled_total == cancelled:
            await asyncio.sleep(0.01)


async def test_a_crash_is_one_clean_error_and_a_restart(stub):
    call = stub.Embed(embed(*["many words " * 80] * 200), timeout=100)
    while not (now := await engine(stub)).active_sequences:
        await asyncio.sleep(0.01)
    os.kill(now.host_pid, signal.SIGKILL)
    error = await refusal(call)
    assert error.reason is Reason.ENGINE_FAILED
    assert "SIGKILL" in error.message
    assert len((await stub.Embed(embed("a cat"), timeout=100)).vectors) == 1
    again = await engine(stub)
    assert again.crashes_total == now.crashes_total + 1
    assert again.host_pid != now.host_pid


async def test_without_a_model_the_refusal_says_what_would_bring_one(llm_pair):
    async with llm_pair.channel() as channel:
        stub = llm_pb2_grpc.LlmServiceStub(channel)
        error = await refusal(stub.Embed(embed("a"), timeout=60))
        assert error.reason is Reason.NOT_FOUND
        assert "OMNISERVE_EMBEDDING_GGUF" in error.message
        assert (await refusal(stub.Rerank(pb.RerankRequest(query="q", documents=["a"]), timeout=60))).field == "model"


def test_a_model_of_the_catalogue_that_makes_vectors_is_loaded_when_asked_for_and_leaves_when_idle(
    start_llm, model_path, tmp_path
):
    models = [
        {"name": "talks", "path": str(default_path()), "ctx": 512},
        {"name": "vectors", "path": str(model_path), "aliases": ["ada"], "ttl_s": 1},
    ]
    (tmp_path / "omniserve.yaml").write_text(yaml.safe_dump({"models": models}))

    async def scenario(pair) -> None:
        async with pair.channel() as channel:
            stub = llm_pb2_grpc.LlmServiceStub(channel)

            async def state() -> int:
                listed = (await stub.ListModels(pb.ListModelsRequest())).models
                assert [each.name for each in listed] == ["talks", "vectors"]
                assert (listed[1].kind, listed[1].embedding_dimensions) == (pb.MODEL_KIND_EMBEDDING, 384)
                return listed[1].state

            assert await state() == pb.MODEL_STATE_AVAILABLE
            request = pb.EmbedRequest(model="ada", inputs=[pb.EmbedInput(text="hello")])
            answer = await stub.Embed(request, timeout=200)
            assert (answer.model, len(answer.vectors[0].values)) == ("vectors", 384)
            again = await stub.Embed(request, timeout=200)
            assert list(again.vectors[0].values) == pytest.approx(list(answer.vectors[0].values), abs=1e-3)
            ranked = await stub.Rerank(pb.RerankRequest(query="a", documents=["a", "xyz"]), timeout=200)
            assert [each.index for each in ranked.results] == [0, 1]
            async with asyncio.timeout(100):
                while await state() != pb.MODEL_STATE_AVAILABLE:
                    await asyncio.sleep(0.1)
            call = stub.Embed(pb.EmbedRequest(model="talks", inputs=[pb.EmbedInput(text="hello")]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            error = from_rpc_error(caught.value)
            assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "model")

    with start_llm(OMNISERVE_CONFIG=str(tmp_path / "omniserve.yaml"), OMNISERVE_LLM_LOAD_WAIT_S="200") as pair:
        asyncio.run(scenario(pair))


async def test_a_text_tokenized_with_its_special_tokens_is_what_an_embedding_model_reads(stub):
    whole = await stub.Tokenize(pb.TokenizeRequest(model=NAME, text="a cat", add_special=True))
    bare = await stub.Tokenize(pb.TokenizeRequest(model=NAME, text="a cat"))
    assert whole.pieces[0] == b"[CLS]"
    assert whole.pieces[-1] == b"[SEP]"
    assert list(whole.tokens[1:-1]) == list(bare.tokens)
    as_tokens = pb.EmbedInput(tokens=pb.Tokens(ids=whole.tokens))
    answer = await stub.Embed(pb.EmbedRequest(model=NAME, inputs=[pb.EmbedInput(text="a cat"), as_tokens]))
    first, second = rows(answer)
    assert float(first @ second) > 0.999
