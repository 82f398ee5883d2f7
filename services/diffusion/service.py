"""The gRPC servicer: messages in, values to those who decide, messages out."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

import grpc.aio
from google.protobuf.message import Message
from typing_extensions import override

from omniserve.diffusion.v1 import diffusion_pb2 as pb
from omniserve.diffusion.v1 import diffusion_pb2_grpc
from omniserve.media.v1 import media_pb2
from services.diffusion import translate
from services.diffusion.core.options import refusal
from services.diffusion.generate import Generator, Who, Work
from services.diffusion.operations import Operations
from services.diffusion.outbox import Outbox
from services.diffusion.scene import Given, Sources
from services.diffusion.upscale import Upscaler, UpscaleWork
from services.kit.access import CLI, EDGE_OPERATOR, caller_of
from services.kit.errors import DomainError, Reason

SERVICES: Final = ("omniserve.diffusion.v1.DiffusionService", "omniserve.diffusion.v1.DiffusionAdminService")
# Who may name files: the operator, and the facade, which lets only the operator's listener do so.
_OPERATORS: Final = frozenset({EDGE_OPERATOR, CLI, "facade"})
_STEPS: Final = frozenset({"step"})

Context = grpc.aio.ServicerContext[Any, Any]


class DiffusionServicer(diffusion_pb2_grpc.DiffusionServiceServicer):
    """omniserve.diffusion.v1.DiffusionService."""

    def __init__(
        self, generator: Generator, upscaler: Upscaler, operations: Operations, *, variation_strength: float
    ) -> None:
        self._generator = generator
        self._upscaler = upscaler
        self._operations = operations
        self._variation_strength = variation_strength

    @override
    async def GenerateImage(self, request: pb.GenerateImageRequest, context: Context) -> None:  # type: ignore[override]
        """See the contract; writes to the context itself, since events come from several sides."""
        work = _work(request.prompt, request.options, Sources(), context)
        await self._make(work, request.options, context, pb.GenerateImageResponse)

    @override
    async def EditImage(self, request: pb.EditImageRequest, context: Context) -> None:  # type: ignore[override]
        """See the contract."""
        if not request.images:
            raise refusal("images", "must hold a picture")
        sources = Sources(
            images=tuple(_given(each, f"images[{place}]") for place, each in enumerate(request.images)),
            mask=_given(request.mask, "mask") if request.HasField("mask") else None,
            strength=request.strength if request.HasField("strength") else None,
            reference_strength=request.reference_strength if request.HasField("reference_strength") else None,
            control=_given(request.control, "control") if request.HasField("control") else None,
            control_strength=request.control_strength if request.HasField("control_strength") else None,
        )
        work = _work(request.prompt, request.options, sources, context)
        await self._make(work, request.options, context, pb.EditImageResponse)

    @override
    async def VaryImage(self, request: pb.VaryImageRequest, context: Context) -> None:  # type: ignore[override]
        """See the contract."""
        strength = request.strength if request.HasField("strength") else self._variation_strength
        sources = Sources(images=(_given(request.image, "image"),), field="image", strength=strength)
        work = _work("", request.options, sources, context)
        await self._make(work, request.options, context, pb.VaryImageResponse)

    @override
    async def UpscaleImage(self, request: pb.UpscaleImageRequest, context: Context) -> None:  # type: ignore[override]
        """See the contract."""
        work = UpscaleWork(
            model=request.model,
            image=_given(request.image, "image"),
            factor=request.factor if request.HasField("factor") else None,
            tile_px=request.tile_px if request.HasField("tile_px") else None,
            encoding=translate.encoding(request.encoding),
            may_wait=request.may_wait if request.HasField("may_wait") else True,
            who=_who(context),
        )
        outbox = Outbox()
        await _stream(self._upscaler.run(work, outbox), outbox, context, pb.UpscaleImageResponse)

    async def _make(self, work: Work, options: pb.ImageOptions, context: Context, response: type[Message]) -> None:
        outbox = Outbox(_STEPS if options.without_steps else frozenset())
        await _stream(self._generator.run(work, outbox), outbox, context, response)

    @override
    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """See the contract."""
        return pb.ListModelsResponse(models=self._operations.models())

    @override
    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """See the contract."""
        return pb.GetStatusResponse(
            engines=self._operations.engines(),
            teleport=self._operations.teleport(),
            draining=self._generator.draining,
            engine_version=self._operations.engine_version(),
        )

    async def drain(self) -> None:
        """Take no new requests."""
        self._generator.draining = self._upscaler.draining = True


async def _stream(run: Coroutine[Any, Any, None], outbox: Outbox, context: Context, response: type[Message]) -> None:
    async def work() -> None:
        try:
            await run
        finally:
            outbox.close()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work())
        while events := await outbox.take():
            for said in events:
                await context.write(response(**{said.kind: said.message}))


def _who(context: Context) -> Who:
    caller = caller_of(context)
    return Who(caller.client, caller.tier, caller.request_id, is_operator=caller.service in _OPERATORS)


def _work(prompt: str, options: pb.ImageOptions, sources: Sources, context: Context) -> Work:
    return Work(options.model, prompt, translate.options(options), sources, _who(context))


def _given(message: media_pb2.ImageInput, field: str) -> Given:
    found = translate.given(message)
    if found is None:
        raise DomainError(Reason.INVALID_REQUEST, f"'{field}' must hold a picture", field=field)
    return found
