"""llm over real gRPC with a real admission and the real model."""

import asyncio
import os
import random
import signal
import subprocess
import sys

import grpc
import pytest

from omniserve.llm.v1 import llm_pb2 as pb
from omniserve.llm.v1 import llm_pb2_grpc
from services.kit.channels import call_metadata
from services.kit.errors import DomainError, Reason, from_rpc_error
from tests.fixtures.amounts import amount

FRANCE = "What is the capital of France?"


def chat(text: str = FRANCE, *, max_tokens: int | None = 16, temperature: float = 0.0, **options) -> pb.ChatRequest:
    limits = pb.Limits(max_tokens=max_tokens, **options.pop("limits", {}))
    return pb.ChatRequest(
        messages=[pb.Message(role="user", content=[pb.ContentPart(text=text)])],
        options=pb.Options(sampling=pb.Sampling(temperature=temperature), limits=limits, **options),
    )


def endless(text: str = "Tell a long story.") -> pb.ChatRequest:
    return chat(text, max_tokens=4000, limits={"ignore_eos": True})


def text_of(events, choice: int = 0) -> str:
    return "".join(c.text for e in events if e.HasField("output") for c in e.output.choices if c.index == choice)


def last_choice(events) -> pb.ChoiceDelta:
    return [c for e in events if e.HasField("output") for c in e.output.choices][-1]


async def collect(stub, request) -> list[pb.ChatResponse]:
    call = stub.Chat if isinstance(request, pb.ChatRequest) else stub.Complete
    return [event async for event in call(request, timeout=100)]


async def refusal(call) -> DomainError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return from_rpc_error(caught.value)


async def first_output(call) -> None:
    async for event in call:
        if event.HasField("output"):
            return


@pytest.fixture
async def stub(llm_pair):
    async with llm_pair.channel() as channel:
        yield llm_pb2_grpc.LlmServiceStub(channel)
    await llm_pair.idle()


async def test_the_capital_of_france_is_paris(stub):
    events = await collect(stub, chat())
    assert "Paris" in text_of(events)
    assert last_choice(events).finish_reason == pb.FINISH_REASON_STOP


async def test_a_stream_ends_with_one_done_that_counts_what_was_streamed(stub):
    events = await collect(stub, chat(max_tokens=30, limits={"ignore_eos": True}))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds.count("done") == 1
    assert kinds[-1] == "done"
    usage = events[-1].done.usage
    assert usage.completion_tokens == 30
    assert usage.completion_tokens == sum(c.tokens for e in events if e.HasField("output") for c in e.output.choices)
    assert usage.prompt_tokens > 10
    assert events[-1].done.model == "SmolLM2-135M-Instruct"


async def test_the_first_token_comes_by_itself_and_later_ones_in_fewer_messages(stub):
    events = await collect(stub, chat(max_tokens=60, limits={"ignore_eos": True}))
    outputs = [event.output.choices[0] for event in events if event.HasField("output")]
    assert outputs[0].tokens <= 3
    assert len(outputs) <= 60


async def test_sixteen_chats_at_once_all_end_well(stub, llm_pair):
    answers = await asyncio.gather(*(collect(stub, chat(max_tokens=12)) for _ in range(16)))
    assert all("Paris" in text_of(events) for events in answers)
    assert all(events[-1].HasField("done") for events in answers)
    await llm_pair.idle()


async def test_a_repeated_prompt_reports_cached_tokens(stub):
    await collect(stub, chat("Which colour has the sky on a clear day?"))
    usage = (await collect(stub, chat("Which colour has the sky on a clear day?")))[-1].done.usage
    assert usage.cached_tokens == usage.prompt_tokens - 1


async def test_several_choices_come_apart(stub):
    events = await collect(stub, chat("Say something.", temperature=1.0, n=3, max_tokens=6))
    assert all(text_of(events, choice) for choice in range(3))
    ends = [c.index for e in events if e.HasField("output") for c in e.output.choices if c.finish_reason]
    assert sorted(ends) == [0, 1, 2]


async def test_an_assistant_turn_at_the_end_is_continued(stub):
    request = chat()
    request.messages.append(pb.Message(role="assistant", content=[pb.ContentPart(text="The capital of France is")]))
    assert text_of(await collect(stub, request)).lstrip().startswith("Paris")


async def test_parts_of_a_message_are_joined(stub):
    request = chat()
    del request.messages[0].content[:]
    request.messages[0].content.extend([pb.ContentPart(text="What is the capital "), pb.ContentPart(text="of France?")])
    assert "Paris" in text_of(await collect(stub, request))


async def test_a_stop_string_ends_the_answer(stub):
    events = await collect(stub, chat(limits={"stop": ["is Par"]}))
    assert "is Par" not in text_of(events)
    assert last_choice(events).stop_string == "is Par"
    assert last_choice(events).finish_reason == pb.FINISH_REASON_STOP


async def test_logprobs_come_with_their_tokens(stub):
    events = await collect(stub, chat(max_tokens=5, logprobs=True, top_logprobs=2))
    found = [one for e in events if e.HasField("output") for c in e.output.choices for one in c.logprobs]
    assert len(found) == 5
    assert all(len(one.top) == 2 and one.logprob <= 0 for one in found)
    assert b"".join(one.raw for one in found).decode() == text_of(events)


async def test_a_completion_goes_on_from_text_and_from_tokens_alike(stub):
    options = pb.Options(sampling=pb.Sampling(temperature=0), limits=pb.Limits(max_tokens=8))
    tokens = (await stub.Tokenize(pb.TokenizeRequest(text="One, two, three,"))).tokens
    from_text = pb.CompleteRequest(prompt=pb.Prompt(text="One, two, three,"), options=options)
    from_tokens = pb.CompleteRequest(prompt=pb.Prompt(tokens=pb.Tokens(ids=tokens)), options=options)
    answers = [text_of(await collect(stub, request)) for request in (from_text, from_tokens)]
    assert answers[0] == answers[1] != ""


async def test_echo_returns_the_prompt_first(stub):
    options = pb.Options(sampling=pb.Sampling(temperature=0), limits=pb.Limits(max_tokens=4))
    events = await collect(stub, pb.CompleteRequest(prompt=pb.Prompt(text="One, two,"), options=options, echo=True))
    assert text_of(events).startswith("One, two,")
    assert len(text_of(events)) > len("One, two,")


async def test_echo_tells_how_likely_the_prompt_was(stub):
    options = pb.Options(
        sampling=pb.Sampling(temperature=0), limits=pb.Limits(max_tokens=2), logprobs=True, top_logprobs=1, n=2
    )
    events = await collect(stub, pb.CompleteRequest(prompt=pb.Prompt(text="One, two,"), options=options, echo=True))
    for choice in range(2):
        found = [
            t for e in events if e.HasField("output") for c in e.output.choices if c.index == choice for t in c.logprobs
        ]
        assert b"".join(each.raw for each in found).decode() == text_of(events, choice)
        assert [each.first for each in found] == [True, *[False] * (len(found) - 1)]
        assert not found[0].top
        assert all(each.logprob < 0 and len(each.top) == 1 for each in found[1:])


async def test_a_prompt_may_only_be_read(stub):
    options = pb.Options(limits=pb.Limits(max_tokens=0), logprobs=True)
    events = await collect(stub, pb.CompleteRequest(prompt=pb.Prompt(text="One, two,"), options=options, echo=True))
    assert text_of(events) == "One, two,"
    assert last_choice(events).finish_reason == pb.FINISH_REASON_LENGTH
    assert events[-1].done.usage.completion_tokens == 0


async def test_the_oldest_turns_of_a_chat_that_is_too_long_are_left_out_if_the_caller_wants_that(stub):
    def talk(*turns: tuple[str, str], **fields) -> pb.ChatRequest:
        messages = [pb.Message(role=role, content=[pb.ContentPart(text=text)]) for role, text in turns]
        request = chat(max_tokens=4)
        del request.messages[:]
        request.MergeFrom(pb.ChatRequest(messages=messages, **fields))
        return request

    rules, old, question = ("system", "Answer in one word."), [("user", "word " * 9000), ("assistant", "Yes.")], FRANCE
    events = await collect(stub, talk(rules, *old, ("user", question), drop_oldest=True))
    short = await collect(stub, talk(rules, ("user", question)))
    assert events[-1].done.usage.prompt_tokens == short[-1].done.usage.prompt_tokens
    assert text_of(events) == text_of(short)
    alone = await refusal(stub.Chat(talk(rules, old[0], drop_oldest=True)))
    assert alone.reason is Reason.CONTEXT_LENGTH_EXCEEDED


async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(stub):
    error = await refusal(stub.Complete(pb.CompleteRequest(prompt=pb.Prompt(text="word " * 9000))))
    assert error.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert error.metadata["context_tokens"] == "8192"
    assert int(error.metadata["prompt_tokens"]) >= 9000
    assert "8192" in error.message
    assert error.metadata["prompt_tokens"] in error.message


async def test_tokens_and_text_go_there_and_back(stub):
    text = "Grüße, 世界! <|im_start|> 🙂"
    answer = await stub.Tokenize(pb.TokenizeRequest(text=text))
    assert answer.context_tokens == 8192
    assert b"".join(answer.pieces).decode() == text
    back = await stub.Detokenize(pb.DetokenizeRequest(tokens=answer.tokens))
    assert back.text == text
    plain = await stub.Tokenize(pb.TokenizeRequest(text=text, parse_special=False))
    assert len(plain.tokens) > len(answer.tokens)


async def test_a_tokenized_chat_shows_the_templated_prompt(stub):
    answer = await stub.Tokenize(pb.TokenizeRequest(chat=chat()))
    assert answer.prompt.endswith("<|im_start|>assistant\n")
    assert FRANCE in answer.prompt
    usage = (await collect(stub, chat(max_tokens=1)))[-1].done.usage
    assert usage.prompt_tokens == len(answer.tokens)


async def test_the_catalogue_tells_the_model_and_its_state(stub):
    (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert (model.name, model.kind, model.state) == ("SmolLM2-135M-Instruct", pb.MODEL_KIND_CHAT, pb.MODEL_STATE_READY)
    assert list(model.capabilities) == ["tools"]
    assert (model.context_tokens, model.quantisation, model.parameters) == (8192, "Q4_1", 134_515_008)
    for name in (model.name, *model.aliases):
        request = chat(max_tokens=1)
        request.model = name
        assert (await collect(stub, request))[-1].HasField("done")


async def test_status_counts_what_was_done(stub, llm_pair):
    before = await llm_pair.engine()
    usage = (await collect(stub, chat(max_tokens=9, limits={"ignore_eos": True})))[-1].done.usage
    after = await llm_pair.engine()
    assert after.decode_tokens_total - before.decode_tokens_total == 9
    assert after.prefill_tokens_total - before.prefill_tokens_total == usage.prompt_tokens
    assert after.requests_total - before.requests_total == 1
    assert after.steps_total > before.steps_total
    assert (after.kv_cells, after.slots, after.placement.device, after.tune.profile) == (8192, 16, "cpu", "cpu")


BAD = {
    "no messages": (pb.ChatRequest(), Reason.INVALID_REQUEST, "messages"),
    "unknown role": (pb.ChatRequest(messages=[pb.Message(role="robot")]), Reason.INVALID_REQUEST, "messages[0].role"),
    "unknown model": (pb.ChatRequest(model="gpt-9", messages=[pb.Message(role="user")]), Reason.NOT_FOUND, "model"),
    "image": (
        pb.ChatRequest(messages=[pb.Message(role="user", content=[pb.ContentPart(media=pb.Media(data=b"x"))])]),
        Reason.UNSUPPORTED,
        "messages[0].content[0].media",
    ),
    "tool without a name": (
        pb.ChatRequest(messages=[pb.Message(role="user")], tools=[pb.Tool(name="a b")]),
        Reason.INVALID_REQUEST,
        "tools[0].name",
    ),
    "no tool to choose": (
        pb.ChatRequest(messages=[pb.Message(role="user")], tool_choice=pb.ToolChoice(kind="KIND_REQUIRED")),
        Reason.INVALID_REQUEST,
        "tool_choice",
    ),
    "no prompt": (pb.CompleteRequest(), Reason.INVALID_REQUEST, "prompt"),
    "empty prompt": (pb.CompleteRequest(prompt=pb.Prompt(text="")), Reason.INVALID_REQUEST, "prompt"),
    "suffix": (pb.CompleteRequest(prompt=pb.Prompt(text="a"), suffix="b"), Reason.UNSUPPORTED, "suffix"),
    "foreign token": (
        pb.CompleteRequest(prompt=pb.Prompt(tokens=pb.Tokens(ids=[1, 49152]))),
        Reason.INVALID_REQUEST,
        "prompt.tokens.ids[1]",
    ),
    "huge prompt": (pb.CompleteRequest(prompt=pb.Prompt(text="x" * 9_000_000)), Reason.TOO_LARGE, "prompt.text"),
    "temperature": (chat(temperature=-1.0), Reason.INVALID_REQUEST, "options.sampling.temperature"),
    "not a number": (chat(temperature=float("nan")), Reason.INVALID_REQUEST, "options.sampling.temperature"),
    "no tokens": (chat(max_tokens=0), Reason.INVALID_REQUEST, "options.limits.max_tokens"),
    "many choices": (chat(n=17), Reason.INVALID_REQUEST, "options.n"),
    "no choice": (chat(n=0), Reason.INVALID_REQUEST, "options.n"),
    "top without logprobs": (chat(top_logprobs=3), Reason.INVALID_REQUEST, "options.top_logprobs"),
    "many stops": (chat(limits={"stop": ["x"] * 17}), Reason.INVALID_REQUEST, "options.limits.stop"),
    "empty stop": (chat(limits={"stop": ["a", ""]}), Reason.INVALID_REQUEST, "options.limits.stop[1]"),
    "sentences": (chat(limits={"max_sentences": 0}), Reason.INVALID_REQUEST, "options.limits.max_sentences"),
    "no schema": (
        chat(structure=pb.Structure(json_schema=pb.JsonSchema(schema_json="{"))),
        Reason.INVALID_REQUEST,
        "options.structure.json_schema.schema_json",
    ),
    "strict schema": (
        chat(structure=pb.Structure(json_schema=pb.JsonSchema(schema_json='{"not": {}}', strict=True))),
        Reason.UNSUPPORTED,
        "options.structure.json_schema.schema_json.not",
    ),
    "no grammar": (
        chat(structure=pb.Structure(grammar="root ::= missing")),
        Reason.INVALID_REQUEST,
        "options.structure.grammar",
    ),
    "structure without an end": (
        chat(structure=pb.Structure(json_object=pb.JsonObject()), limits={"ignore_eos": True}),
        Reason.INVALID_REQUEST,
        "options.limits.ignore_eos",
    ),
    "adapter": (chat(adapters=[pb.Adapter(name="x")]), Reason.INVALID_REQUEST, "options.adapters[0].name"),
    "speculation": (chat(speculate=True), Reason.UNSUPPORTED, "options.speculate"),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_is_refused_naming_the_field(stub, case):
    request, reason, field = BAD[case]
    error = await refusal((stub.Chat if isinstance(request, pb.ChatRequest) else stub.Complete)(request, timeout=60))
    assert (error.reason, error.field) == (reason, field)
    assert error.code is not grpc.StatusCode.INTERNAL


async def test_without_an_embedding_model_embed_and_rerank_name_the_setting(stub):
    for call in (stub.Embed(pb.EmbedRequest()), stub.Rerank(pb.RerankRequest())):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        error = from_rpc_error(caught.value)
        assert error.reason is Reason.NOT_FOUND
        assert "OMNISERVE_EMBEDDING_GGUF" in error.message


async def test_without_a_folder_to_swap_from_nothing_is_swapped(llm_pair):
    async with llm_pair.channel() as channel:
        admin = llm_pb2_grpc.LlmAdminServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin.SwapModel(pb.SwapModelRequest(path="x.gguf"))
        error = from_rpc_error(caught.value)
        assert (error.reason, error.field) == (Reason.UNSUPPORTED, "path")
        assert "OMNISERVE_LLM_SWAP_DIR" in error.message
        loaded = await admin.LoadModel(pb.LoadModelRequest())
        assert loaded.model.state == pb.MODEL_STATE_READY


async def test_a_detokenized_token_outside_the_vocabulary_is_refused(stub):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Detokenize(pb.DetokenizeRequest(tokens=[5, -1]))
    error = from_rpc_error(caught.value)
    assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "tokens[1]")


async def test_a_caller_that_leaves_frees_sequence_and_permit(stub, llm_pair):
    call = stub.Chat(endless())
    await first_output(call)
    assert (await llm_pair.permits())[0] == 1
    call.cancel()
    await llm_pair.idle()


async def test_random_disconnects_leave_nothing(stub, llm_pair):
    chance = random.Random(11)
    gate = asyncio.Semaphore(24)

    async def leave() -> None:
        async with gate:
            call = stub.Chat(endless("Tell a story about a river. " * chance.choice((1, 20))))
            try:
                async with asyncio.timeout(chance.uniform(0, 0.3)):
                    async for _ in call:
                        pass
            except TimeoutError:
                call.cancel()

    async with asyncio.TaskGroup() as group:
        for _ in range(amount(60, thorough=200)):
            group.create_task(leave())
    await llm_pair.idle()
    assert "Paris" in text_of(await collect(stub, chat()))


async def test_who_may_not_wait_is_refused_while_all_slots_are_taken(stub, llm_pair):
    calls = [stub.Chat(endless()) for _ in range(16)]
    await asyncio.gather(*(first_output(call) for call in calls))
    error = await refusal(stub.Chat(chat(may_wait=False)))
    assert error.reason is Reason.SATURATED
    waiting = stub.Chat(chat())
    async for event in waiting:
        assert event.queued.position == 1
        break
    calls[0].cancel()
    assert "Paris" in text_of([event async for event in waiting])
    for call in calls:
        call.cancel()
    await llm_pair.idle()


async def test_a_session_carries_many_requests(stub, llm_pair):
    session = stub.GenerateSession()
    for number in range(1, 9):
        start = pb.StartGeneration(
            request=number, chat=chat(max_tokens=10), client="alice", tier="paid", request_id=f"r{number}"
        )
        await session.write(pb.GenerateSessionRequest(start=start))
    bad = pb.StartGeneration(request=9, complete=pb.CompleteRequest(), client="bob", tier="free")
    await session.write(pb.GenerateSessionRequest(start=bad))
    texts: dict[int, str] = {}
    ended: dict[int, str] = {}
    messages = events = 0
    async for message in session:
        messages += 1
        for event in message.events:
            events += 1
            kind = event.WhichOneof("event")
            if kind == "output":
                texts[event.request] = texts.get(event.request, "") + event.output.choices[0].text
            if kind in {"done", "failed"}:
                ended[event.request] = kind
            if kind == "failed":
                assert (event.failed.reason, event.failed.field) == ("invalid_request", "prompt")
                assert event.failed.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        if len(ended) == 9:
            break
    assert ended == {**dict.fromkeys(range(1, 9), "done"), 9: "failed"}
    assert all("Paris" in texts[number] for number in range(1, 9))
    assert messages < events, "the events of one step share a message"
    await session.done_writing()
    assert [message async for message in session] == []
    await llm_pair.idle()


async def test_a_session_cancels_one_request_and_keeps_the_others(stub, llm_pair):
    session = stub.GenerateSession()
    for number in (1, 2):
        await session.write(pb.GenerateSessionRequest(start=pb.StartGeneration(request=number, chat=endless())))
    seen: set[int] = set()
    while seen != {1, 2}:
        message = await session.read()
        seen |= {event.request for event in message.events if event.HasField("output")}
    await session.write(pb.GenerateSessionRequest(cancel=pb.CancelGeneration(request=1)))
    async with asyncio.timeout(30):
        while (await llm_pair.engine()).active_sequences != 1:
            await asyncio.sleep(0.02)
    assert (await llm_pair.permits())[0] == 1
    session.cancel()
    await llm_pair.idle()


async def test_an_id_used_twice_ends_the_session(stub, llm_pair):
    session = stub.GenerateSession()
    for _ in range(2):
        await session.write(pb.GenerateSessionRequest(start=pb.StartGeneration(request=1, chat=endless())))
    error = await refusal(session)
    assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "start.request")
    await llm_pair.idle()


async def test_only_the_facade_may_open_a_session(llm_pair):
    async with llm_pair.channel("jobs") as channel:
        error = await refusal(llm_pb2_grpc.LlmServiceStub(channel).GenerateSession())
    assert error.reason is Reason.FORBIDDEN


async def test_the_caller_s_tier_reaches_admission(stub, llm_pair):
    calls = [stub.Chat(endless()) for _ in range(16)]
    await asyncio.gather(*(first_output(call) for call in calls))
    order: list[str] = []

    async def ask(tier: str) -> None:
        metadata = call_metadata(client="alice", tier=tier, request_id=f"r-{tier}")
        async for event in stub.Chat(chat(max_tokens=1), metadata=metadata):
            if event.HasField("output") and tier not in order:
                order.append(tier)

    async with asyncio.TaskGroup() as group:
        group.create_task(ask("free"))
        while (await llm_pair.permits())[1] != 1:
            await asyncio.sleep(0.02)
        group.create_task(ask("paid"))
        while (await llm_pair.permits())[1] != 2:
            await asyncio.sleep(0.02)
        calls[0].cancel()
        while not order:
            await asyncio.sleep(0.02)
        for call in calls:
            call.cancel()
    assert order == ["paid", "free"]
    await llm_pair.idle()


async def test_a_killed_engine_fails_its_streams_and_the_next_request_works(stub, llm_pair):
    before = await llm_pair.engine()
    calls = [stub.Chat(endless()) for _ in range(4)]
    await asyncio.gather(*(first_output(call) for call in calls))
    os.kill(before.host_pid, signal.SIGKILL)
    for call in calls:
        error = await refusal(call)
        assert error.reason is Reason.ENGINE_FAILED
        assert "SIGKILL" in error.message
    assert "Paris" in text_of(await collect(stub, chat()))
    after = await llm_pair.engine()
    assert after.crashes_total == before.crashes_total + 1
    assert after.host_pid != before.host_pid
    assert after.decode_tokens_total >= before.decode_tokens_total, "counters outlive the host"
    await llm_pair.ready()
    await llm_pair.idle()


async def test_a_request_that_comes_while_the_engine_restarts_waits_for_it(stub, llm_pair):
    engine = await llm_pair.engine()
    os.kill(engine.host_pid, signal.SIGKILL)
    while (await llm_pair.engine()).state == pb.MODEL_STATE_READY:
        await asyncio.sleep(0)
    events = await collect(stub, chat())
    assert events[0].HasField("loading")
    assert events[0].loading.model == "SmolLM2-135M-Instruct"
    assert "Paris" in text_of(events)
    await llm_pair.ready()


async def test_tokenizing_goes_on_while_the_engine_is_dead(stub, llm_pair):
    engine = await llm_pair.engine()
    os.kill(engine.host_pid, signal.SIGSTOP)
    try:
        answer = await stub.Tokenize(pb.TokenizeRequest(text="hello"), timeout=20)
        assert b"".join(answer.pieces) == b"hello"
    finally:
        os.kill(engine.host_pid, signal.SIGCONT)


def test_without_max_tokens_the_answer_may_fill_the_context(start_llm):
    with start_llm(OMNISERVE_LLM_REQUEST_CTX="128") as pair:

        async def scenario() -> None:
            async with pair.channel() as channel:
                stub = llm_pb2_grpc.LlmServiceStub(channel)
                options = pb.Options(limits=pb.Limits(ignore_eos=True))
                for asked in (None, 5000):
                    if asked is not None:
                        options.limits.max_tokens = asked
                    request = pb.CompleteRequest(prompt=pb.Prompt(text="word " * 100), options=options)
                    events = await collect(stub, request)
                    usage = events[-1].done.usage
                    assert last_choice(events).finish_reason == pb.FINISH_REASON_LENGTH
                    assert usage.prompt_tokens + usage.completion_tokens == 128
                error = await refusal(stub.Complete(pb.CompleteRequest(prompt=pb.Prompt(text="word " * 200))))
                assert error.metadata["context_tokens"] == "128"

        asyncio.run(scenario())


def test_without_admission_requests_say_so(start_llm):
    with start_llm(with_admission=False) as pair:

        async def ask() -> DomainError:
            async with pair.channel() as channel:
                return await refusal(llm_pb2_grpc.LlmServiceStub(channel).Chat(chat(), timeout=60))

        assert asyncio.run(ask()).reason is Reason.ADMISSION_UNAVAILABLE


def test_a_stuck_engine_is_killed_and_started_again(start_llm):
    with start_llm(OMNISERVE_LLM_STUCK_S="5") as pair:  # a crowded machine computes a first step for more than a second

        async def scenario() -> None:
            async with pair.channel() as channel:
                stub = llm_pb2_grpc.LlmServiceStub(channel)
                call = stub.Chat(endless())
                await first_output(call)
                os.kill((await pair.engine()).host_pid, signal.SIGSTOP)
                error = await refusal(call)
                assert error.reason is Reason.ENGINE_FAILED
                assert "nothing for" in error.message
                assert "Paris" in text_of(await collect(stub, chat()))
                assert (await pair.engine()).crashes_total == 1

        asyncio.run(scenario())


def test_a_drained_service_lets_its_streams_end_and_takes_no_more(start_llm):
    with start_llm(OMNISERVE_DRAIN_GRACE_S="30") as pair:

        async def scenario() -> None:
            async with pair.channel() as channel:
                session = llm_pb2_grpc.LlmServiceStub(channel).GenerateSession()
                first = pb.StartGeneration(request=1, chat=chat(max_tokens=150, limits={"ignore_eos": True}))
                await session.write(pb.GenerateSessionRequest(start=first))
                while not any(event.HasField("output") for event in (await session.read()).events):
                    pass
                pair.llm.send_signal(signal.SIGTERM)
                while await asyncio.to_thread(pair.is_serving):
                    await asyncio.sleep(0.01)
                late = pb.StartGeneration(request=2, chat=chat())
                await session.write(pb.GenerateSessionRequest(start=late))
                ended = {}
                while (message := await session.read()) is not grpc.aio.EOF:
                    for event in message.events:
                        if event.WhichOneof("event") in {"done", "failed"}:
                            ended[event.request] = event.failed.reason
                assert ended == {1: "", 2: "draining"}
                assert await session.code() is grpc.StatusCode.OK

        asyncio.run(scenario())
        assert pair.llm.wait(30) == 0


def test_a_file_that_is_no_model_stops_the_start_with_a_sentence(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x00" * 3)
    environ = {**os.environ, "OMNISERVE_LLM_GGUF": str(broken), "OMNISERVE_STATE_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "services.llm"], check=False, env=environ, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert f"{broken}: truncated: the number of tensors at byte 8" in ended.stderr
    assert "Traceback" not in ended.stderr
