"""What service and host processes say to each other.

Tokens travel as the raw bytes of little-endian 32-bit integers. Messages are arrays, not maps, and a step's outputs come
in one message, so that the engine thread spends microseconds on them.
"""

from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from services.kit.hosts.core.messages import LoadFailed, Loading


class Dry(msgspec.Struct, frozen=True, array_like=True):
    """The don't-repeat-yourself penalty; see the contract."""

    multiplier: float
    base: float
    allowed_length: int
    window: int
    sequence_breakers: tuple[str, ...]


class Xtc(msgspec.Struct, frozen=True, array_like=True):
    """Exclude top choices."""

    probability: float
    threshold: float


class Mirostat(msgspec.Struct, frozen=True, array_like=True):
    """Controls perplexity instead of cutting the distribution."""

    version: int
    tau: float
    eta: float


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are chosen, every value decided. `seed` None means a random one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    dry: Dry | None = None
    xtc: Xtc | None = None
    mirostat: Mirostat | None = None
    logit_bias: dict[int, float] = {}


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """When a generation ends. `max_tokens`: decided by the service, so that prompt and answer fit the context.

    `max_sentences`: 0 for as many as come.
    """

    max_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_probability: float = 0.0
    max_sentences: int = 0


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """What the output has to obey: a grammar in GBNF. `field`: what asked for it.

    `triggers`: the grammar holds for what follows the first of these texts; without any, from the first token.
    `anchored`: only where nothing but space precedes them. `thoughts`: what stands between these marks does not count;
    `inside`: the prompt ends between them.
    """

    grammar: str
    field: str = "options.structure"
    triggers: tuple[str, ...] = ()
    anchored: bool = False
    thoughts: tuple[str, str] | None = None
    inside: bool = False


class SpeculationRules(msgspec.Struct, frozen=True, array_like=True):
    """How drafts are made: at most `draft` tokens at once, 0 for never.

    `lookup`: also from what the text said before, found by a run of `min_ngram` to `max_ngram` tokens. After `patience`
    misses in a row one source makes none for `probe` tokens.
    """

    draft: int = 0
    min_ngram: int = 2
    max_ngram: int = 5
    patience: int = 3
    probe: int = 32
    lookup: bool = True


class DraftModelConfig(msgspec.Struct, frozen=True, array_like=True):
    """The model that drafts for another: its file and layers. It proposes nothing less likely than `min_probability`."""

    path: str
    layers: int
    min_probability: float


# ---- service -> engine host ----------------------------------------------------------------------------------


class Tuning(msgspec.Struct, frozen=True, array_like=True):
    """What was set of what a device's profile otherwise chooses; None, and an empty type of the cache, leave it to that.

    `batch_tokens`: most tokens in one step; `ubatch_tokens`: most of them computed at once.
    `flash_attention`: auto, on or off.
    """

    batch_tokens: int | None = None
    ubatch_tokens: int | None = None
    kv_type: str = ""
    flash_attention: str = "auto"


class EngineConfig(msgspec.Struct, frozen=True, array_like=True, tag="config"):
    """First message: what to load and how to run it. `gpu_layers`: None is automatic, negative is all.

    `context_cells`: KV cells of all sequences together; `context_tokens`: most of one request, 0 for as many. `loras`: files of
    adapters, by name.
    """

    path: str
    layers: int
    context_cells: int
    context_tokens: int
    slots: int
    warm_sequences: int
    tuning: Tuning
    threads: int
    gpu_layers: int | None
    keep_free_mib: int
    allow_cpu_fallback: bool
    stall_s: float
    stall_ratio: float
    flush_s: float
    govern_threads: bool
    loras: dict[str, str] = {}
    speculation: SpeculationRules = SpeculationRules()
    stored_prefix_bytes: int = 0
    draft_model: DraftModelConfig | None = None


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Begin a request. `rank`: larger is more important when cells run out. `logprobs`: alternatives, -1 for none at all.

    `adapters`: names with their strengths. `tells_prompt`: the prompt's own tokens get log-probabilities too, in a Reading.
    `shown`: control tokens whose names are a part of the text. `sized`: say how much text came with each token.
    """

    request: int
    prompt: bytes
    sampling: Sampling
    limits: Limits
    choices: int = 1
    logprobs: int = -1
    reuse: bool = True
    rank: int = 0
    adapters: tuple[tuple[str, float], ...] = ()
    constraint: Constraint | None = None
    shown: tuple[int, ...] = ()
    sized: bool = False
    speculate: bool = False
    tells_prompt: bool = False


class Announce(msgspec.Struct, frozen=True, array_like=True, tag="announce"):
    """So many more requests are being prepared (negative: fewer): the next step waits a moment for them."""

    requests: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """End a request now; nothing more is said about it."""

    request: int


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """Ask for the counters now; answered by a Step between two steps."""


# ---- engine host -> service ----------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model serves. `context_tokens`: most tokens of one request. `profile`: what chose how it runs where nothing was set."""

    context_tokens: int
    kv_cells: int
    device: str
    gpu_layers: int
    degraded: bool
    reason: str
    shares_prefixes: bool
    flash_attention: bool
    profile: str
    batch_tokens: int
    ubatch_tokens: int
    kv_type: str


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """A token with its probability's natural logarithm; `best`: the alternatives, best first.

    `logprob` is None for the first token of a text, which nothing precedes.
    """

    token: int
    piece: bytes
    logprob: float | None
    best: tuple["Logprob", ...] = ()


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """The end of a choice. `reason`: stop, sentences, length or min_probability."""

    reason: str
    stop_string: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """What one choice gained. `sizes`: characters of the text that came with each token, if asked."""

    request: int
    choice: int
    text: str
    tokens: int
    finish: Finish | None = None
    logprobs: tuple[Logprob, ...] = ()
    sizes: tuple[int, ...] = ()


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How much of a prompt is processed."""

    request: int
    processed: int
    total: int


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """How likely a prompt's tokens were, all of them; comes before anything that its choices gain."""

    request: int
    logprobs: tuple[Logprob, ...]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A request that cannot go on although the engine can. `reason` and `field` as in the error table."""

    request: int
    reason: str
    message: str
    field: str | None = None


class Counters(msgspec.Struct, array_like=True):
    """The engine's state and its counts since the process began.

    `drafted`, `accepted`, `calls_saved`: of all sources; those of the draft model, and its own calls, come last.
    """

    active: int = 0
    waiting: int = 0
    suspended: int = 0
    kv_used: int = 0
    warm: int = 0
    threads: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    requests: int = 0
    cancelled: int = 0
    decode_us: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    calls_saved: int = 0
    stored_bytes: int = 0
    model_drafted: int = 0
    model_accepted: int = 0
    model_calls_saved: int = 0
    draft_calls: int = 0


class Step(msgspec.Struct, array_like=True, tag="step"):
    """What became ready since the last one, for all requests together."""

    counters: Counters
    deltas: list[Delta]
    progress: list[Progress]
    failures: list[Failure]
    readings: list[Reading] = []


PROGRAM: Final = "services.llm.host"
"""The module that is run for a host."""

ToEngine = EngineConfig | Submit | Announce | Cancel | Probe
FromEngine = Loading | Ready | LoadFailed | Step

# ---- service <-> text host -----------------------------------------------------------------------------------


class TextConfig(msgspec.Struct, frozen=True, array_like=True, tag="config"):
    """First message: whose vocabulary and template, and their bounds. `template`: instead of the file's own."""

    path: str
    render_s: float
    prompt_bytes: int
    memory_mib: int
    template: str = ""


class Render(msgspec.Struct, frozen=True, array_like=True, tag="render"):
    """Format a chat by the model's template and tokenize it. `variables` go to the template as they are."""

    call: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    prefill: str | None
    now_unix_s: float
    thinking: bool | None = None


class Tokenize(msgspec.Struct, frozen=True, array_like=True, tag="tokenize"):
    """Tokenize text. `begin`: prepend the start token where the model has one and the text does not begin with it.

    `whole`: with what the model wants at both ends, as an embedding model reads it.
    """

    call: int
    text: str
    begin: bool
    parse_special: bool
    whole: bool = False


class CheckGrammar(msgspec.Struct, frozen=True, array_like=True, tag="check_grammar"):
    """Let llama.cpp read a grammar where a crash hurts nobody. `field`: what a refusal names."""

    call: int
    grammar: str
    field: str


class Infill(msgspec.Struct, frozen=True, array_like=True, tag="infill"):
    """Tokenize a text with a gap for the model to fill; only for vocabularies that have tokens for it."""

    call: int
    before: str
    after: str


class Pieces(msgspec.Struct, frozen=True, array_like=True, tag="pieces"):
    """Give the bytes of tokens."""

    call: int
    tokens: bytes


class TextReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The vocabulary is loaded. `own_template`: the file has a template, else ChatML stands in; `template`: which it is.

    `infill`: it has tokens for texts with a gap.
    """

    vocabulary: int
    context_tokens: int
    own_template: bool
    end_tokens: tuple[int, ...]
    template: str = ""
    infill: bool = False


class Tokenized(msgspec.Struct, frozen=True, array_like=True, tag="tokenized"):
    """Answer to Render and Tokenize. `prompt`: the text that was tokenized."""

    call: int
    tokens: bytes
    prompt: str


class Spelled(msgspec.Struct, frozen=True, array_like=True, tag="spelled"):
    """Answer to Pieces."""

    call: int
    pieces: list[bytes]


class GrammarChecked(msgspec.Struct, frozen=True, array_like=True, tag="grammar_checked"):
    """Answer to CheckGrammar: it can be used."""

    call: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A call that has no answer; `field`: the request's field at fault."""

    call: int
    reason: str
    message: str
    field: str | None = None


ToText = TextConfig | Render | Tokenize | Infill | Pieces | CheckGrammar
FromText = TextReady | LoadFailed | Tokenized | Spelled | GrammarChecked | Refused

# ---- tokens --------------------------------------------------------------------------------------------------


def pack_tokens(tokens: Any) -> bytes:  # noqa: ANN401 - a sequence or an array of integers
    """Return tokens as they travel."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> npt.NDArray[np.int32]:
    """Return tokens that have travelled, as a read-only array."""
    return np.frombuffer(data, dtype="<i4")
