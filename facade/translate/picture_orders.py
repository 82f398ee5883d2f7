"""POST /admin/diffusion/teleport/clear: what the operator asks of the exact caches of pictures."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from facade.translate.fields import Choice, ListOf, Text
from facade.translate.record import Field, record
from omniserve.diffusion.v1 import diffusion_pb2 as pb

_LAYERS: Final[Mapping[str, int]] = MappingProxyType(
    {"result": pb.TELEPORT_LAYER_RESULT, "latent": pb.TELEPORT_LAYER_LATENT, "condition": pb.TELEPORT_LAYER_CONDITION}
)
CLEAR: Final = record(
    (
        Field("model", Text(1, 256), "Only what this model made, by its name or alias; absent means every model."),
        Field(
            "layers",
            ListOf(Choice(tuple(_LAYERS)), most=len(_LAYERS)),
            "What to empty; absent means all. Finished pictures and their latents go together.",
        ),
    )
)


def read_clear(body: Mapping[str, Any]) -> pb.ClearTeleportRequest:
    """Translate a body; DomainError invalid_request names the field at fault."""
    values = CLEAR.read(body, "")
    layers = [_LAYERS[each] for each in values.get("layers", ())]
    return pb.ClearTeleportRequest(model=values.get("model"), layers=layers)  # type: ignore[arg-type]  # enum's numbers
