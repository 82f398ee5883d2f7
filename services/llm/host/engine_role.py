"""The engine host: loads a model, then runs the engine thread beside the one that reads commands."""

from services.kit.hosts.core.framing import Frames
from services.kit.hosts.core.messages import LoadFailed
from services.kit.hosts.pipe import Pipe
from services.kit.hosts.serving import compute_and_listen, first
from services.llm.core.placement import Placed, PlacementError
from services.llm.core.tuning import Tuned, plainer, tune
from services.llm.core.wire import DraftModelConfig, EngineConfig, Ready, ToEngine
from services.llm.host.context import Context
from services.llm.host.draft_model import READ_AT_ONCE, DraftModel, MisfitError, check_vocabulary
from services.llm.host.engine import Engine
from services.llm.host.llama import LlamaError, Model, Vocabulary, stop_listening
from services.llm.host.loading import load_model


def serve_engine(pipe: Pipe) -> None:
    """Serve until the service closes the pipe; exit status 0 after a failed load that was reported."""
    frames: Frames[ToEngine] = Frames(ToEngine)
    config = first(pipe, frames, EngineConfig)
    try:
        engine = _load(config, pipe)
    except (LlamaError, PlacementError, MisfitError) as error:
        pipe.send(LoadFailed(str(error), permanent=not isinstance(error, LlamaError)))
        return
    compute_and_listen(engine.run, lambda: _listen(engine, pipe, frames))


def _listen(engine: Engine, pipe: Pipe, frames: Frames[ToEngine]) -> None:
    while True:
        for message in frames.feed(pipe.receive()):
            if isinstance(message, EngineConfig):
                raise TypeError("a second configuration")
            engine.tell(message)


def _load(config: EngineConfig, pipe: Pipe) -> Engine:
    model, placed = load_model(
        pipe,
        config.path,
        layers=config.layers,
        gpu_layers=config.gpu_layers,
        keep_free_mib=config.keep_free_mib,
        allow_cpu_fallback=config.allow_cpu_fallback,
    )
    tuned, context = _tuned_context(config, model, device=placed.device)
    draft_model = None
    if config.draft_model is not None:
        draft_model = _load_draft_model(config, config.draft_model, pipe, leader=context, vocabulary=model.vocabulary)
    engine = Engine(config, model, context, pipe.send, draft_model)
    stop_listening()
    engine.warm_up()
    pipe.send(_ready(config, model, context, placed, tuned))
    return engine


def _tuned_context(config: EngineConfig, model: Model, *, device: str) -> tuple[Tuned, Context]:
    """Return a context as suits the device. Raises LlamaError.

    Not every model's cache can be quantised: its heads must be a multiple of the blocks. Unless that was asked for, it is
    done without then.
    """
    tuned = tune(config.tuning, device)
    try:
        return tuned, _context(config, model, tuned)
    except LlamaError:
        plain = plainer(tuned, config.tuning)
        if plain is None:
            raise
        return plain, _context(config, model, plain)


def _load_draft_model(
    config: EngineConfig, draft: DraftModelConfig, pipe: Pipe, *, leader: Context, vocabulary: Vocabulary
) -> DraftModel:
    """Load the small model that proposes, where there is room beside the large one. Raises LlamaError and MisfitError."""
    model, _ = load_model(
        pipe,
        draft.path,
        layers=draft.layers,
        gpu_layers=config.gpu_layers,
        keep_free_mib=config.keep_free_mib,
        allow_cpu_fallback=config.allow_cpu_fallback,
    )
    if not model.shares_prefixes:
        raise MisfitError(f"{draft.path} cannot draft: nothing that it has read can be taken back")
    check_vocabulary(model.vocabulary, vocabulary)
    context = Context(
        model,
        cells=config.context_cells,
        sequences=config.slots,
        batch_tokens=READ_AT_ONCE,
        ubatch_tokens=READ_AT_ONCE,
        threads=config.threads,
        kv_type="f16",
        flash_attention=config.tuning.flash_attention,
    )
    return DraftModel(
        model,
        context,
        leader=leader,
        sequences=config.slots,
        shared_tokens=vocabulary.size,
        min_probability=draft.min_probability,
    )


def _context(config: EngineConfig, model: Model, tuned: Tuned) -> Context:
    return Context(
        model,
        cells=config.context_cells,
        sequences=config.slots + config.warm_sequences,
        batch_tokens=tuned.batch_tokens,
        ubatch_tokens=tuned.ubatch_tokens,
        threads=config.threads,
        kv_type=tuned.kv_type,
        flash_attention=tuned.flash_attention,
    )


def _ready(config: EngineConfig, model: Model, context: Context, placed: Placed, tuned: Tuned) -> Ready:
    layers = model.layers + 1 if placed.gpu_layers < 0 else placed.gpu_layers
    return Ready(
        context_tokens=min(
            context.cells, model.context_tokens or context.cells, config.context_tokens or context.cells
        ),
        kv_cells=context.cells,
        device=placed.device,
        gpu_layers=layers,
        degraded=placed.degraded,
        reason=placed.reason,
        shares_prefixes=model.shares_prefixes,
        flash_attention=context.flash_attention,
        profile=tuned.profile,
        batch_tokens=tuned.batch_tokens,
        ubatch_tokens=tuned.ubatch_tokens,
        kv_type=tuned.kv_type,
    )
