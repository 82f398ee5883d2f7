"""Between the contract's messages and the values of embeddings: nothing is decided here."""

from typing import Final

from omniserve.llm.v1 import llm_pb2 as pb
from services.kit.errors import DomainError, Reason
from services.llm.core.embed_wire import EmbedCounters
from services.llm.core.embedding import EmbedWork, Input, RerankWork, Vectors
from services.llm.core.tuning import profile_of
from services.llm.embed import Embedded, Reranked
from services.llm.resident import Resident
from services.llm.translate import STATES

_PACKED_FLOATS: Final = 0x0A  # field 1, length-delimited


def embed_work(message: pb.EmbedRequest) -> EmbedWork:
    """Return what is to be embedded. Raises DomainError for an input that is neither text nor tokens."""
    return EmbedWork(
        model=message.model,
        inputs=tuple(_input(each, f"inputs[{place}]") for place, each in enumerate(message.inputs)),
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        truncate=message.truncate,
        raw=message.raw,
    )


def _input(message: pb.EmbedInput, field: str) -> Input:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise DomainError(Reason.INVALID_REQUEST, f"'{field}' must be given as text or tokens", field=field)
    return Input(text=message.text) if kind == "text" else Input(tokens=tuple(message.tokens.ids))


def rerank_work(message: pb.RerankRequest) -> RerankWork:
    """Return what is to be ranked."""
    return RerankWork(
        model=message.model,
        query=message.query,
        documents=tuple(message.documents),
        top_n=message.top_n if message.HasField("top_n") else None,
    )


def embedded(answer: Embedded) -> pb.EmbedResponse:
    """Return the answer to Embed."""
    return pb.EmbedResponse(vectors=_vectors(answer.vectors), prompt_tokens=answer.tokens, model=answer.model)


def _vectors(rows: Vectors) -> list[pb.Vector]:
    """Return the rows as messages; parsed from bytes, which spares a Python object for each number."""
    size = rows.shape[1] * 4
    head = bytes([_PACKED_FLOATS, *_varint(size)])
    data = rows.astype("<f4", copy=False).tobytes()
    return [pb.Vector.FromString(head + data[at : at + size]) for at in range(0, len(data), size)]


def _varint(number: int) -> list[int]:
    digits = []
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return [*digits, number]


def reranked(answer: Reranked) -> pb.RerankResponse:
    """Return the answer to Rerank."""
    results = [pb.RankedDocument(index=each.index, score=each.score) for each in answer.results]
    return pb.RerankResponse(results=results, prompt_tokens=answer.tokens, model=answer.model)


def status(found: Resident, now: EmbedCounters) -> pb.EngineStatus:
    """Return the state of a model's host; its steps prefill and never decode."""
    report = found.embedder.report
    ready = report.ready
    answer = pb.EngineStatus(
        model=found.name,
        state=STATES[report.state],
        host_pid=report.pid,
        active_sequences=now.waiting,
        waiting_requests=now.active,
        slots=ready.sequences if ready is not None else 0,
        steps_total=now.steps,
        prefill_tokens_total=now.tokens,
        requests_total=now.requests,
        cancelled_total=now.cancelled,
        crashes_total=report.crashes,
        decode_ms_total=now.compute_us // 1000,
        stuck=report.stuck,
        placement=pb.Placement(gpu_layers_asked=_layers_asked(found)),
    )
    if ready is not None:
        answer.placement.MergeFrom(
            pb.Placement(device=ready.device, gpu_layers=ready.gpu_layers, degraded=ready.degraded, reason=ready.reason)
        )
        answer.tune.MergeFrom(
            pb.Tune(
                profile=profile_of(ready.device).name,
                batch_tokens=ready.batch_tokens,
                ubatch_tokens=ready.batch_tokens,
                threads=ready.threads,
                flash_attention=ready.flash_attention,
            )
        )
    return answer


def _layers_asked(found: Resident) -> int | None:
    asked = found.served.engine.gpu_layers
    return asked if asked is not None and asked >= 0 else None
