"""The operator's servicer: loads and unloads."""

from typing import Any

import grpc.aio
from typing_extensions import override

from omniserve.diffusion.v1 import diffusion_pb2 as pb
from omniserve.diffusion.v1 import diffusion_pb2_grpc
from services.diffusion.core.options import refusal
from services.diffusion.operations import Operations
from services.kit.hosts.outcome import to_its_end
from services.kit.owner import Owner

Context = grpc.aio.ServicerContext[Any, Any]


class DiffusionAdminServicer(diffusion_pb2_grpc.DiffusionAdminServiceServicer):
    """omniserve.diffusion.v1.DiffusionAdminService. What it begins is carried to its end, also when the caller leaves."""

    def __init__(self, operations: Operations, owner: Owner, *, unload_wait_s: float) -> None:
        self._operations = operations
        self._owner = owner
        self._unload_wait_s = unload_wait_s

    @override
    async def LoadModel(self, request: pb.LoadModelRequest, context: Context) -> pb.LoadModelResponse:
        """See the contract."""
        resident = self._operations.residents.find_any(request.model)
        await self._operations.load(resident)
        return pb.LoadModelResponse(model=self._operations.model(resident))

    @override
    async def UnloadModel(self, request: pb.UnloadModelRequest, context: Context) -> pb.UnloadModelResponse:
        """See the contract."""
        resident = self._operations.residents.find_any(request.model)
        wait_s = request.wait_ms / 1000 if request.HasField("wait_ms") else self._unload_wait_s
        unload = self._operations.unload(resident, wait_s=wait_s)
        await to_its_end(self._owner, unload, name=f"unload {resident.name}")
        return pb.UnloadModelResponse(model=self._operations.model(resident))

    @override
    async def ListLoadedModels(
        self, request: pb.ListLoadedModelsRequest, context: Context
    ) -> pb.ListLoadedModelsResponse:
        """See the contract."""
        return pb.ListLoadedModelsResponse(engines=self._operations.engines())

    @override
    async def GetTeleportStatus(
        self, request: pb.GetTeleportStatusRequest, context: Context
    ) -> pb.GetTeleportStatusResponse:
        """See the contract."""
        return pb.GetTeleportStatusResponse(teleport=self._operations.teleport())

    @override
    async def ClearTeleport(self, request: pb.ClearTeleportRequest, context: Context) -> pb.ClearTeleportResponse:
        """See the contract."""
        if pb.TELEPORT_LAYER_UNSPECIFIED in request.layers:
            raise refusal("layers", "names a layer that is not stated")
        layers = set(request.layers) or set(pb.TeleportLayer.values())
        entries, size = self._operations.clear(
            request.model if request.HasField("model") else None,
            pictures=bool(layers & {pb.TELEPORT_LAYER_RESULT, pb.TELEPORT_LAYER_LATENT}),
            prompts=pb.TELEPORT_LAYER_CONDITION in layers,
        )
        return pb.ClearTeleportResponse(entries=entries, size_bytes=size)
