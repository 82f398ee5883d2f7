"""The operator's servicer: loads, unloads and swaps."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc.aio
import msgspec
from typing_extensions import override

from omniserve.llm.v1 import llm_pb2 as pb
from omniserve.llm.v1 import llm_pb2_grpc
from services.kit.errors import DomainError, Reason
from services.kit.hosts.outcome import to_its_end
from services.kit.owner import Owner
from services.llm import translate
from services.llm.adapters import model_file
from services.llm.adapters.model_file import ModelFile, ModelFileError
from services.llm.core.catalogue import Kind, entry
from services.llm.operations import Operations
from services.llm.residents import Residents
from services.llm.served import Served
from services.llm.settings import LlmSettings

Context = grpc.aio.ServicerContext[Any, Any]

_LEAST_CONTEXT: Final = 256
_MOST_SLOTS: Final = 128
_LONGEST_PATH: Final = 4096


class LlmAdminServicer(llm_pb2_grpc.LlmAdminServiceServicer):
    """omniserve.llm.v1.LlmAdminService. What it begins is carried to its end, also when the caller leaves."""

    def __init__(self, residents: Residents, operations: Operations, settings: LlmSettings, owner: Owner) -> None:
        self._residents = residents
        self._operations = operations
        self._settings = settings
        self._owner = owner

    @override
    async def LoadModel(self, request: pb.LoadModelRequest, context: Context) -> pb.LoadModelResponse:
        """See the contract."""
        resident = self._residents.find(request.model, *(Kind if request.model else (Kind.CHAT,)))
        await self._operations.load(resident)
        return pb.LoadModelResponse(model=translate.model(resident))

    @override
    async def UnloadModel(self, request: pb.UnloadModelRequest, context: Context) -> pb.UnloadModelResponse:
        """See the contract."""
        resident = self._residents.find(request.model, *(Kind if request.model else (Kind.CHAT,)))
        wait_s = request.wait_ms / 1000 if request.HasField("wait_ms") else self._settings.swap_wait_s
        await to_its_end(self._owner, self._operations.unload(resident, wait_s=wait_s), name=f"unload {resident.name}")
        return pb.UnloadModelResponse(model=translate.model(resident))

    @override
    async def SwapModel(self, request: pb.SwapModelRequest, context: Context) -> pb.SwapModelResponse:
        """See the contract."""
        path = allowed(request.path, self._settings.swap_dir)
        served = await asyncio.to_thread(self._swapped, path, request)
        resident = await to_its_end(
            self._owner, self._operations.swap(served, wait_s=self._settings.swap_wait_s), name=f"swap to {path.name}"
        )
        return pb.SwapModelResponse(model=translate.model(resident))

    def _swapped(self, path: Path, request: pb.SwapModelRequest) -> Served:
        """Return what would be served instead of the default model. Raises DomainError."""
        former = self._residents.find("", Kind.CHAT).served
        file = _read(path)
        config = msgspec.structs.replace(
            former.chat,
            path=str(file.path),
            layers=file.header.layers,
            loras={},  # they were made for the former file
            gpu_layers=request.gpu_layers if request.HasField("gpu_layers") else None,
            context_cells=_bounded(request, "context_tokens", self._settings.ctx, _LEAST_CONTEXT, 2**31 - 1),
            slots=_bounded(request, "slots", self._settings.contexts, 1, _MOST_SLOTS),
        )
        theirs = self._settings.model_copy(update={"contexts": config.slots, "warm_prefixes": config.warm_sequences})
        if (misfit := theirs.misfit()) is not None:
            raise DomainError(Reason.INVALID_REQUEST, misfit, field="slots")
        text = msgspec.structs.replace(former.text, path=str(file.path))
        if former.is_fixed:
            return replace(former, file=file, engine=config, text=text, loras_bytes=0)
        # The name was the former file's, so the new file brings its own; what callers were given beyond it stays.
        return replace(
            former,
            entry=entry(file.path.stem, name="", aliases=self._settings.model_aliases),
            file=file,
            engine=config,
            text=text,
            system=self._settings.own_system(),
        )


def allowed(asked: str, folder: Path | None) -> Path:
    """Return the file that a path below the folder names, links followed.

    Raises DomainError: `unsupported` without a folder, `invalid_request` for what leads out of it or is no path, `not_found`.
    """
    if folder is None:
        message = "no folder is set from which models may be swapped in; OMNISERVE_LLM_SWAP_DIR names it"
        raise DomainError(Reason.UNSUPPORTED, message, field="path")
    if not asked or "\0" in asked or len(asked) > _LONGEST_PATH:
        message = f"'path' must have 1 to {_LONGEST_PATH} characters, none of them zero"
        raise DomainError(Reason.INVALID_REQUEST, message, field="path")
    root = Path(os.path.realpath(folder))
    found = Path(os.path.realpath(root / asked))
    # Before anything is looked up: what is outside is not even said to exist.
    if not found.is_relative_to(root):
        message = f"'path' must lead to a file below OMNISERVE_LLM_SWAP_DIR; {asked[:200]!r} leads out of it"
        raise DomainError(Reason.INVALID_REQUEST, message, field="path")
    if not found.is_file():
        raise DomainError(Reason.NOT_FOUND, f"there is no file {asked[:200]!r} to swap in", field="path")
    return found


def _read(path: Path) -> ModelFile:
    try:
        file = model_file.read(path)
    except ModelFileError as error:
        raise DomainError(Reason.INVALID_REQUEST, str(error), field="path") from None
    if file.header.kind != Kind.CHAT.value:
        message = f"{path.name} is of kind {file.header.kind}; the default model must generate text"
        raise DomainError(Reason.INVALID_REQUEST, message, field="path")
    return file


def _bounded(request: pb.SwapModelRequest, field: str, default: int, low: int, high: int) -> int:
    value = int(getattr(request, field)) if request.HasField(field) else default  # type: ignore[arg-type]
    if not low <= value <= high:
        raise DomainError(Reason.INVALID_REQUEST, f"'{field}' is {value}; {low} to {high} is allowed", field=field)
    return value
