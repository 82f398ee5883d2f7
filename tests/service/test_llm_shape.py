"""The form of answers over real gRPC with the real model: schemas, grammars, tools and thoughts."""

import itertools
import json

import jsonschema
import pytest

from omniserve.llm.v1 import llm_pb2 as pb
from omniserve.llm.v1 import llm_pb2_grpc
from services.kit.errors import DomainError, Reason, from_rpc_error

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {}}
REQUIRED = pb.ToolChoice(kind=pb.ToolChoice.KIND_REQUIRED, parallel=False)


def chat(text: str, *, max_tokens: int = 60, seed: int | None = None, **request) -> pb.ChatRequest:
    options = request.pop("options", {})
    return pb.ChatRequest(
        messages=[pb.Message(role="user", content=[pb.ContentPart(text=text)])],
        options=pb.Options(
            sampling=pb.Sampling(temperature=0.0 if seed is None else 1.0, seed=seed),
            limits=pb.Limits(max_tokens=max_tokens),
            **options,
        ),
        **request,
    )


def schema(value: object, *, strict: bool = True) -> pb.Structure:
    return pb.Structure(json_schema=pb.JsonSchema(name="it", schema_json=json.dumps(value), strict=strict))


def tools(*, strict: bool = False) -> list[pb.Tool]:
    return [
        pb.Tool(name="weather", description="Tells the weather.", parameters_json=json.dumps(WEATHER), strict=strict),
        pb.Tool(name="now", description="Tells the time.", parameters_json=json.dumps(NOW)),
    ]


class Answer:
    """One choice, put together."""

    def __init__(self, events, choice: int = 0) -> None:
        deltas = [c for e in events if e.HasField("output") for c in e.output.choices if c.index == choice]
        self.text = "".join(delta.text for delta in deltas)
        self.reasoning = "".join(delta.reasoning for delta in deltas)
        self.finish = deltas[-1].finish_reason
        self.logprobs = [each for delta in deltas for each in delta.logprobs]
        self.usage = events[-1].done.usage
        self.calls: list[tuple[str, str, str]] = []
        for piece in (call for delta in deltas for call in delta.tool_calls):
            if piece.index == len(self.calls):
                self.calls.append((piece.id, piece.name, ""))
            identity, name, arguments = self.calls[piece.index]
            assert not piece.arguments_json or identity
            self.calls[piece.index] = (identity, name, arguments + piece.arguments_json)


async def ask(stub, request) -> Answer:
    call = stub.Chat if isinstance(request, pb.ChatRequest) else stub.Complete
    return Answer([event async for event in call(request, timeout=100)])


async def refusal(stub, request) -> DomainError:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - told apart below
        await ask(stub, request)
    return from_rpc_error(caught.value)


@pytest.fixture
async def stub(llm_pair):
    async with llm_pair.channel() as channel:
        yield llm_pb2_grpc.LlmServiceStub(channel)
    await llm_pair.idle()


@pytest.mark.parametrize("seed", [None, 1, 2])
async def test_a_schema_is_obeyed_by_a_model_of_any_mind(stub, seed):
    answer = await ask(stub, chat("Where is it how warm?", seed=seed, options={"structure": schema(WEATHER)}))
    assert answer.finish == pb.FINISH_REASON_STOP
    jsonschema.validate(json.loads(answer.text), WEATHER)


async def test_a_seed_repeats_an_answer_under_a_grammar(stub):
    request = chat("Where?", seed=5, options={"structure": schema(WEATHER), "cache_prompt": False})
    assert (await ask(stub, request)).text == (await ask(stub, request)).text


async def test_an_answer_that_is_cut_says_so_and_is_the_beginning_of_json(stub):
    structure = pb.Structure(json_object=pb.JsonObject())
    answer = await ask(stub, chat("Tell me about Paris.", max_tokens=3, options={"structure": structure}))
    assert answer.finish == pb.FINISH_REASON_LENGTH
    assert answer.text.startswith("{")
    assert answer.usage.completion_tokens == 3


async def test_a_completion_obeys_a_grammar_under_penalties_too(stub):
    structure = pb.Structure(grammar='root ::= ("yes" | "no") "!"{3}')
    options = pb.Options(
        structure=structure,
        sampling=pb.Sampling(temperature=1.0, top_k=40, repetition_penalty=1.5, seed=3),
        limits=pb.Limits(max_tokens=20),
    )
    answer = await ask(stub, pb.CompleteRequest(prompt=pb.Prompt(text="Is it?"), options=options))
    assert answer.text in {"yes!!!", "no!!!"}


async def test_probabilities_under_a_grammar_are_the_models_own(stub):
    structure = pb.Structure(grammar='root ::= "zebra"')
    answer = await ask(stub, chat("Hi", options={"structure": structure, "logprobs": True, "top_logprobs": 2}))
    assert "".join(each.token for each in answer.logprobs).startswith("zebra")
    assert answer.logprobs[0].logprob < answer.logprobs[0].top[0].logprob


async def test_a_bias_counts_under_a_grammar(stub):
    structure = pb.Structure(grammar='root ::= "a" | "b"')
    letters = {}
    for letter in "ab":
        tokens = (await stub.Tokenize(pb.TokenizeRequest(text=letter))).tokens
        letters[letter] = tokens[0]
    for letter, token in letters.items():
        request = chat("Choose.", options={"structure": structure})
        request.options.sampling.logit_bias[token] = 90
        assert (await ask(stub, request)).text == letter


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= a\na ::= b a "y" | "x"\nb ::= c\nc ::= ""',  # without an end: it kills the process that reads it
        'root ::= "a" "b',
    ],
)
async def test_a_grammar_that_llama_cpp_cannot_take_is_a_refusal_and_the_engine_lives(stub, llm_pair, grammar):
    before = await llm_pair.engine()
    error = await refusal(stub, chat("Hi", options={"structure": pb.Structure(grammar=grammar)}))
    assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "options.structure.grammar")
    after = await llm_pair.engine()
    assert (after.host_pid, after.crashes_total) == (before.host_pid, before.crashes_total)


async def test_a_required_call_is_made_and_its_arguments_are_valid(stub):
    answer = await ask(stub, chat("How warm is Paris?", tools=tools(strict=True), tool_choice=REQUIRED))
    (identity, name, arguments), *_ = answer.calls
    assert identity.startswith("call_")
    assert name in {"weather", "now"}
    assert answer.finish == pb.FINISH_REASON_TOOL_CALLS
    assert answer.text == ""
    jsonschema.validate(json.loads(arguments), WEATHER if name == "weather" else NOW)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_named_tool_is_the_one_that_is_called_once(stub, seed):
    choice = pb.ToolChoice(kind=pb.ToolChoice.KIND_NAMED, name="weather")
    answer = await ask(stub, chat("Hello!", seed=seed, tools=tools(), tool_choice=choice))
    ((_, name, arguments),) = answer.calls
    assert name == "weather"
    jsonschema.validate(json.loads(arguments), WEATHER)


async def test_several_choices_call_apart_with_ids_of_their_own(stub):
    request = chat(
        "Hello!", seed=3, tools=tools(), tool_choice=pb.ToolChoice(kind=pb.ToolChoice.KIND_NAMED, name="now")
    )
    request.options.n = 2
    events = [event async for event in stub.Chat(request, timeout=100)]
    answers = [Answer(events, choice) for choice in range(2)]
    made = [(name, json.loads(arguments)) for answer in answers for _, name, arguments in answer.calls]
    assert made == [("now", {})] * 2
    assert answers[0].calls[0][0] != answers[1].calls[0][0]


async def test_when_none_may_be_called_the_model_hears_of_none(stub):
    request = chat(
        "What is the capital of France?", tools=tools(), tool_choice=pb.ToolChoice(kind=pb.ToolChoice.KIND_NONE)
    )
    answer = await ask(stub, request)
    assert "Paris" in answer.text
    assert answer.calls == []


async def test_a_call_is_obeyed_from_its_opening_on_when_the_model_decides(stub):
    """The template is the model's own; the example in the conversation makes it likely that it follows suit."""
    example = [
        ("user", "What time is it?"),
        ("assistant", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    ] * 3
    request = chat("What time is it?", tools=tools())
    del request.messages[:]
    for role, text in (*example, ("user", "What time is it?")):
        request.messages.append(pb.Message(role=role, content=[pb.ContentPart(text=text)]))
    answer = await ask(stub, request)
    assert [call[1] for call in answer.calls][:1] == ["now"]
    assert json.loads(answer.calls[0][2]) == {}
    assert "<tool_call>" not in answer.text


async def test_results_are_fed_back(stub):
    request = chat("How warm is Paris?", tools=tools())
    call = pb.ToolCall(id="call_1", name="weather", arguments_json='{"city": "Paris", "unit": "C"}')
    request.messages.append(pb.Message(role="assistant", tool_calls=[call]))
    request.messages.append(pb.Message(role="tool", tool_call_id="call_1", content=[pb.ContentPart(text="31 degrees")]))
    prompt = (await stub.Tokenize(pb.TokenizeRequest(chat=request))).prompt
    assert '"name": "weather", "arguments": {"city": "Paris", "unit": "C"}' in prompt
    assert "<tool_response>\n31 degrees\n</tool_response>" in prompt
    assert prompt.index("Tells the weather.") < prompt.index("31 degrees")


async def test_a_strict_tool_that_cannot_be_enforced_is_refused_with_its_place(stub):
    bad = pb.Tool(
        name="f", parameters_json='{"properties": {"a": {"uniqueItems": true, "type": "array"}}}', strict=True
    )
    error = await refusal(stub, chat("Hi", tools=[bad]))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "tools[0].parameters_json.properties.a.uniqueItems")


# ---- thoughts ----------------------------------------------------------------------------------------------------

THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{# <think> and </think> #}"
)
OPENED = THINKING + "<think>\n"


@pytest.fixture(scope="module")
def thinkers(start_llm, tmp_path_factory):
    """llm with a template whose model may think, and one whose prompt has it think already."""
    folder = tmp_path_factory.mktemp("templates")
    (folder / "may.jinja").write_text(THINKING)
    (folder / "opened.jinja").write_text(OPENED)
    with (
        start_llm(OMNISERVE_LLM_CHAT_TEMPLATE=str(folder / "may.jinja")) as may,
        start_llm(OMNISERVE_LLM_CHAT_TEMPLATE=str(folder / "opened.jinja")) as opened,
    ):
        yield may, opened


async def test_thoughts_are_told_apart_and_counted(thinkers):
    grammar = pb.Structure(grammar='root ::= "<think>\\nfirst things</think>\\n\\nyes"')
    async with thinkers[0].channel() as channel:
        answer = await ask(
            llm_pb2_grpc.LlmServiceStub(channel), chat("Hi", options={"structure": grammar, "logprobs": True})
        )
    assert (answer.reasoning, answer.text) == ("first things", "yes")
    assert 0 < answer.usage.reasoning_tokens < answer.usage.completion_tokens
    assert "".join(each.token for each in answer.logprobs).strip() == "yes"


async def test_a_prompt_that_opens_thoughts_begins_with_them(thinkers):
    async with thinkers[1].channel() as channel:
        answer = await ask(llm_pb2_grpc.LlmServiceStub(channel), chat("Hi", max_tokens=8))
    assert answer.reasoning
    assert answer.text == ""
    assert answer.finish == pb.FINISH_REASON_LENGTH
    assert answer.usage.reasoning_tokens == 8


async def test_without_thinking_the_block_is_closed_and_nothing_leaks(thinkers):
    for pair, kind in itertools.product(thinkers, ("plain", "schema")):
        async with pair.channel() as channel:
            stub = llm_pb2_grpc.LlmServiceStub(channel)
            options = {"structure": schema(WEATHER)} if kind == "schema" else {}
            request = chat("What is the capital of France?", enable_thinking=False, options=options)
            prompt = (await stub.Tokenize(pb.TokenizeRequest(chat=request))).prompt
            answer = await ask(stub, request)
        assert prompt.rstrip().endswith("</think>")
        assert answer.reasoning == ""
        assert answer.usage.reasoning_tokens == 0
        assert "think>" not in answer.text
        if kind == "schema":
            jsonschema.validate(json.loads(answer.text), WEATHER)


async def test_a_forced_call_may_follow_thoughts(thinkers):
    async with thinkers[0].channel() as channel:
        answer = await ask(llm_pb2_grpc.LlmServiceStub(channel), chat("Hi", tools=tools(), tool_choice=REQUIRED))
    assert answer.calls or answer.finish == pb.FINISH_REASON_LENGTH
    assert "think>" not in answer.text + answer.reasoning
