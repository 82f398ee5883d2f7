"""Between the contract's messages and the values of core: nothing is decided here."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from google.protobuf import json_format

from omniserve.llm.v1 import llm_pb2 as pb
from services.kit.errors import DomainError, Reason
from services.kit.hosts.core.lifecycle import State
from services.llm.adapters.engine import add_counters
from services.llm.core.adapters import AskedAdapter
from services.llm.core.catalogue import Kind
from services.llm.core.dialect import dialect_of
from services.llm.core.memory import MIB
from services.llm.core.options import AskedOptions, AskedSampling
from services.llm.core.prompt import Call, Chat, Completion, Turn
from services.llm.core.shaping import CallPiece, Shaped
from services.llm.core.structure import Structure, StructureKind
from services.llm.core.toolbox import Tool, Toolbox, Use, check_tools
from services.llm.core.wire import Counters, Delta, Dry, EngineConfig, Finish, Logprob, Mirostat, Ready, Xtc
from services.llm.resident import Resident
from services.llm.served import Served

_SCALARS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "penalty_window",
)
_FINISH: Final[Mapping[str, pb.FinishReason.ValueType]] = {
    "stop": pb.FINISH_REASON_STOP,
    "sentences": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "min_probability": pb.FINISH_REASON_MIN_PROBABILITY,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}
_USES: Final[Mapping[int, Use]] = {
    pb.ToolChoice.KIND_UNSPECIFIED: Use.AUTO,
    pb.ToolChoice.KIND_AUTO: Use.AUTO,
    pb.ToolChoice.KIND_NONE: Use.NONE,
    pb.ToolChoice.KIND_REQUIRED: Use.REQUIRED,
    pb.ToolChoice.KIND_NAMED: Use.NAMED,
}
STATES: Final[Mapping[State, pb.ModelState.ValueType]] = {
    State.AVAILABLE: pb.MODEL_STATE_AVAILABLE,
    State.LOADING: pb.MODEL_STATE_LOADING,
    State.READY: pb.MODEL_STATE_READY,
    State.UNLOADING: pb.MODEL_STATE_UNLOADING,
    State.FAILED: pb.MODEL_STATE_FAILED,
}
_GAP_TOKENS: Final = frozenset(
    {"tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.fim_suf_token_id", "tokenizer.ggml.prefix_token_id"}
)
"""Any of these in a file's header: the model fills gaps."""
_KINDS: Final[Mapping[Kind, pb.ModelKind.ValueType]] = {
    Kind.CHAT: pb.MODEL_KIND_CHAT,
    Kind.EMBEDDING: pb.MODEL_KIND_EMBEDDING,
    Kind.RERANK: pb.MODEL_KIND_RERANK,
}


def options(message: pb.Options) -> AskedOptions:
    """Return the options as the caller wrote them."""
    limits = message.limits
    return AskedOptions(
        sampling=_sampling(message.sampling),
        max_tokens=limits.max_tokens if limits.HasField("max_tokens") else None,
        stop=tuple(limits.stop),
        ignore_eos=limits.ignore_eos,
        min_probability=limits.min_probability if limits.HasField("min_probability") else None,
        max_sentences=limits.max_sentences if limits.HasField("max_sentences") else None,
        choices=message.n if message.HasField("n") else None,
        structure=_structure(message.structure) if message.HasField("structure") else None,
        logprobs=message.logprobs,
        top_logprobs=message.top_logprobs,
        cache_prompt=message.cache_prompt if message.HasField("cache_prompt") else None,
        speculate=message.speculate if message.HasField("speculate") else None,
        may_wait=message.may_wait if message.HasField("may_wait") else None,
        adapters=tuple(
            AskedAdapter(each.name, each.scale if each.HasField("scale") else None) for each in message.adapters
        ),
    )


def _structure(message: pb.Structure) -> Structure | None:
    kind = message.WhichOneof("kind")
    if kind is None:
        return None
    if kind == "json_schema":
        return Structure(StructureKind.JSON_SCHEMA, message.json_schema.schema_json, strict=message.json_schema.strict)
    return Structure(StructureKind(kind), message.grammar)


def _sampling(message: pb.Sampling) -> AskedSampling:
    scalars = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    dry, xtc, mirostat = message.dry, message.xtc, message.mirostat
    return AskedSampling(
        **scalars,
        dry=Dry(dry.multiplier, dry.base, dry.allowed_length, dry.window, tuple(dry.sequence_breakers))
        if message.HasField("dry")
        else None,
        xtc=Xtc(xtc.probability, xtc.threshold) if message.HasField("xtc") else None,
        mirostat=Mirostat(mirostat.version, mirostat.tau, mirostat.eta) if message.HasField("mirostat") else None,
        logit_bias=dict(message.logit_bias),
    )


def completion(message: pb.CompleteRequest) -> Completion:
    """Return what is to be continued. Raises DomainError."""
    kind = message.prompt.WhichOneof("kind")
    if kind is None:
        raise DomainError(Reason.INVALID_REQUEST, "'prompt' must be given as text or tokens", field="prompt")
    if message.HasField("suffix") and message.echo and message.options.logprobs:
        sentence = (
            "'suffix' cannot be combined with 'echo' and log-probabilities: the model reads the texts in another order"
        )
        raise DomainError(Reason.UNSUPPORTED, sentence, field="suffix")
    if kind == "text":
        suffix = message.suffix if message.HasField("suffix") else None
        return Completion(text=message.prompt.text, echo=message.echo, suffix=suffix)
    if message.HasField("suffix"):
        raise DomainError(Reason.UNSUPPORTED, "'suffix' can only follow a prompt that is a text", field="suffix")
    return Completion(tokens=tuple(message.prompt.tokens.ids), echo=message.echo)


def chat(message: pb.ChatRequest) -> Chat:
    """Return the conversation. Raises DomainError for tools that cannot be offered."""
    toolbox = _toolbox(message)
    check_tools(toolbox)
    return Chat(
        turns=tuple(_turn(each) for each in message.messages),
        thinking=message.enable_thinking if message.HasField("enable_thinking") else None,
        variables=json_format.MessageToDict(message.template_variables),
        toolbox=toolbox,
        drop_oldest=message.drop_oldest,
    )


def _toolbox(message: pb.ChatRequest) -> Toolbox:
    choice = message.tool_choice
    use = _USES.get(choice.kind)
    if use is None:
        raise DomainError(
            Reason.INVALID_REQUEST, f"'tool_choice.kind' is {choice.kind}, which is none", field="tool_choice.kind"
        )
    return Toolbox(
        tools=tuple(Tool(tool.name, tool.description, tool.parameters_json, tool.strict) for tool in message.tools),
        use=use,
        name=choice.name,
        parallel=choice.parallel if choice.HasField("parallel") else True,
    )


def _turn(message: pb.Message) -> Turn:
    kinds = [part.WhichOneof("kind") for part in message.content]
    return Turn(
        role=message.role,
        texts=tuple(part.text for part, kind in zip(message.content, kinds, strict=True) if kind == "text"),
        media=tuple(place for place, kind in enumerate(kinds) if kind == "media"),
        name=message.name if message.HasField("name") else None,
        calls=tuple(_call(each) for each in message.tool_calls),
        answers=message.tool_call_id if message.HasField("tool_call_id") else None,
        reasoning=message.reasoning if message.HasField("reasoning") else None,
    )


def _call(message: pb.ToolCall) -> Call:
    try:
        parsed: Any = json.loads(message.arguments_json)
    except ValueError:
        parsed = None
    return Call(message.id, message.name, message.arguments_json, parsed if isinstance(parsed, dict) else None)


def output(deltas: Sequence[Delta]) -> pb.Output:
    """Return one message for deltas of one request; those of the same choice become one."""
    choices: dict[int, pb.ChoiceDelta] = {}
    for delta in deltas:
        choice = choices.get(delta.choice)
        if choice is None:
            choice = choices[delta.choice] = pb.ChoiceDelta(index=delta.choice, text=delta.text, tokens=delta.tokens)
        else:
            choice.text += delta.text
            choice.tokens += delta.tokens
        if isinstance(delta, Shaped):
            choice.reasoning += delta.reasoning
            choice.tool_calls.extend(_call_delta(each) for each in delta.calls)
        if delta.logprobs:
            choice.logprobs.extend(_logprob(each) for each in delta.logprobs)
        if delta.finish is not None:
            _finish(choice, delta.finish)
    return pb.Output(choices=choices.values())


def _call_delta(piece: CallPiece) -> pb.ToolCallDelta:
    return pb.ToolCallDelta(index=piece.index, id=piece.identity, name=piece.name, arguments_json=piece.arguments)


def _finish(choice: pb.ChoiceDelta, finish: Finish) -> None:
    choice.finish_reason = _FINISH[finish.reason]
    choice.sentence_limit = finish.reason == "sentences"
    if finish.stop_string is not None:
        choice.stop_string = finish.stop_string


def _logprob(value: Logprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token=value.piece.decode("utf-8", "replace"),
        raw=value.piece,
        logprob=0.0 if value.logprob is None else value.logprob,
        first=value.logprob is None,
        id=value.token,
        top=[_logprob(each) for each in value.best],
    )


def failed(error: DomainError) -> pb.Failed:
    """Return the end of a session's request."""
    return pb.Failed(
        code=error.code.value[0],
        reason=error.reason.value,
        message=error.message,
        field=error.field,
        retry_after_ms=error.retry_after_ms,
    )


def model(resident: Resident) -> pb.Model:
    """Return a catalogue entry with its state."""
    served, report = resident.served, resident.host.report
    header = served.file.header
    return pb.Model(
        name=served.entry.name,
        aliases=served.entry.aliases,
        kind=_KINDS[served.entry.kind],
        state=STATES[report.state],
        context_tokens=resident.context_tokens,
        size_mib=-(-served.file.size // MIB),
        parameters=header.parameters,
        quantisation=header.quantisation,
        failure=report.failure if report.state is State.FAILED else None,
        created_unix_s=served.file.made_unix_s,
        embedding_dimensions=header.embedding_width if served.entry.kind is Kind.EMBEDDING else None,
        ttl_ms=round(served.ttl_s * 1000),
        pinned=served.pinned,
        memory_mib=served.need_mib,
        adapters=served.chat.loras if served.entry.kind is Kind.CHAT else (),
        capabilities=_capabilities(resident) if served.entry.kind is Kind.CHAT else (),
    )


def _capabilities(resident: Resident) -> list[str]:
    """Return what a model can do beyond text: calling tools is described to those whose template knows none."""
    served, known = resident.served, resident.text.known
    thinks = dialect_of(served.text.template or served.file.header.template).thinking is not None
    fills = _GAP_TOKENS & served.file.header.metadata.keys() or (known is not None and known.infill)
    return ["tools", *(["thinking"] if thinks else []), *(["infill"] if fills else [])]


def tokens(ids: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return tokens as an array."""
    return np.fromiter(ids, np.int32, len(ids))


def status(resident: Resident, now: Counters) -> pb.EngineStatus:
    """Return the state of a model's engine."""
    report, config = resident.engine.report, resident.served.chat
    total = add_counters(resident.engine.past, now)
    return pb.EngineStatus(
        model=resident.name,
        state=STATES[report.state],
        host_pid=report.pid,
        active_sequences=total.active,
        waiting_requests=total.waiting + total.suspended,
        kv_used_cells=total.kv_used,
        kv_cells=report.ready.kv_cells if report.ready is not None else 0,
        slots=config.slots,
        steps_total=total.steps,
        prefill_tokens_total=total.prefill_tokens + total.cached_tokens,
        cached_tokens_total=total.cached_tokens,
        decode_tokens_total=total.decode_tokens,
        requests_total=total.requests,
        cancelled_total=total.cancelled,
        crashes_total=report.crashes,
        placement=_placement(report.ready, config),
        tune=_tune(report.ready, now),
        decode_ms_total=total.decode_us // 1000,
        stuck=report.stuck,
        stored_prefix_mib=now.stored_bytes // MIB,
        speculation=_speculation(total, resident.served),
    )


def _placement(ready: Ready | None, config: EngineConfig) -> pb.Placement:
    asked = config.gpu_layers if config.gpu_layers is not None and config.gpu_layers >= 0 else None
    if ready is None:
        return pb.Placement(kv_type=config.tuning.kv_type, gpu_layers_asked=asked)
    return pb.Placement(
        device=ready.device,
        gpu_layers=ready.gpu_layers,
        gpu_layers_asked=asked,
        kv_type=ready.kv_type,
        degraded=ready.degraded,
        reason=ready.reason,
    )


def _speculation(total: Counters, served: Served) -> pb.Speculation:
    by_model = pb.DraftSource(
        drafted_total=total.model_drafted,
        accepted_total=total.model_accepted,
        calls_saved_total=total.model_calls_saved,
    )
    by_lookup = pb.DraftSource(
        drafted_total=total.drafted - total.model_drafted,
        accepted_total=total.accepted - total.model_accepted,
        calls_saved_total=total.calls_saved - total.model_calls_saved,
    )
    return pb.Speculation(
        drafted_total=total.drafted,
        accepted_total=total.accepted,
        calls_saved_total=total.calls_saved,
        lookup=by_lookup,
        model=by_model,
        draft_model=None if served.draft is None else served.draft.path.stem,
        draft_calls_total=total.draft_calls,
    )


def _tune(ready: Ready | None, now: Counters) -> pb.Tune | None:
    if ready is None:
        return None
    return pb.Tune(
        profile=ready.profile,
        batch_tokens=ready.batch_tokens,
        ubatch_tokens=ready.ubatch_tokens,
        threads=now.threads,
        flash_attention=ready.flash_attention,
    )
