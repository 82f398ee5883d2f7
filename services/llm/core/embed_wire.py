"""What the service and an embedding host say to each other; tokens and vectors travel as raw little-endian bytes."""

import msgspec

from services.kit.hosts.core.messages import LoadFailed, Loading

# ---- service -> embedding host -------------------------------------------------------------------------------


class EmbedConfig(msgspec.Struct, frozen=True, array_like=True, tag="config"):
    """First message: what to load and how to run it. `gpu_layers`: None is automatic, negative is all.

    `input_tokens`: most tokens of one input. `batch_tokens`: tokens after which a step takes no further input.
    `pooling`: mean, cls, last, or empty for what the file says. `threads`: 0 means one beside a text engine on the same
    cores (`shares_cores`), otherwise `cores`.
    """

    path: str
    layers: int
    input_tokens: int
    batch_tokens: int
    pooling: str
    threads: int
    cores: int
    shares_cores: bool
    gpu_layers: int | None
    keep_free_mib: int
    allow_cpu_fallback: bool


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One input: `tokens`, or else `text`, or with `query` a pair that is scored."""

    text: str = ""
    tokens: bytes | None = None
    query: str | None = None


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """Tokenize the inputs of a request and keep them. `truncate`: cut what is too long instead of refusing it."""

    request: int
    items: list[Item]
    truncate: bool


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Compute a request that was prepared."""

    request: int


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Forget a request; nothing more is said about it."""

    request: int


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Ask for the counters now; answered by a Computed between two steps."""


# ---- embedding host -> service -------------------------------------------------------------------------------


class EmbedReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model serves. `width`: floats of a vector; a reranker's begin with the score.

    `vocabulary`: tokens that there are; `input_tokens`: most of one input.
    """

    width: int
    vocabulary: int
    input_tokens: int
    batch_tokens: int
    sequences: int
    threads: int
    device: str
    gpu_layers: int
    degraded: bool
    reason: str
    flash_attention: bool


class Prepared(msgspec.Struct, frozen=True, array_like=True, tag="prepared"):
    """The inputs are tokenized. `tokens`: all of them together."""

    request: int
    tokens: int


class Unfit(msgspec.Struct, frozen=True, array_like=True, tag="unfit"):
    """An input that cannot be computed, by its place: `tokens` of at most `limit`; none at all when `tokens` is 0."""

    request: int
    place: int
    tokens: int
    limit: int


class Part(msgspec.Struct, frozen=True, array_like=True):
    """The next vectors of a request, in the order of its inputs."""

    request: int
    vectors: bytes


class EmbedCounters(msgspec.Struct, array_like=True):
    """The engine's state and its counts since the process began. `active`: requests; `waiting`: inputs of them."""

    active: int = 0
    waiting: int = 0
    steps: int = 0
    tokens: int = 0
    inputs: int = 0
    requests: int = 0
    cancelled: int = 0
    compute_us: int = 0


class Computed(msgspec.Struct, array_like=True, tag="computed"):
    """What one step made, for all requests together."""

    counters: EmbedCounters
    parts: list[Part]


ToEmbedder = EmbedConfig | Prepare | Start | Drop | Ask
FromEmbedder = Loading | EmbedReady | LoadFailed | Prepared | Unfit | Computed
