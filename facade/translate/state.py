"""What a service's own status says about how the mesh is. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.message import Message

from omniserve.diffusion.v1 import diffusion_pb2
from omniserve.llm.v1 import llm_pb2

Json = dict[str, Any]


def plain(message: Message) -> Json:
    """Return a message as JSON: fields by their own names, zeros included, 64-bit numbers as numbers.

    Absent `optional` fields and messages are left out.
    """
    return {
        field.name: _field(message, field)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _field(message: Message, field: Any) -> Any:  # noqa: ANN401 - a field's descriptor, of either implementation; JSON
    value = getattr(message, field.name)
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        of_value = entry.fields_by_name["value"]
        return {str(key): _value(value[key], of_value) for key in value}
    return [_value(each, field) for each in value] if field.is_repeated else _value(value, field)


def _value(value: Any, field: Any) -> Any:  # noqa: ANN401 - as above
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return named.name if named is not None else value
    return value.hex() if isinstance(value, bytes) else value


def troubles(status: llm_pb2.GetStatusResponse | diffusion_pb2.GetStatusResponse) -> list[str]:
    """Return why a service, although it serves, is not what the settings ask for: one phrase for each engine in trouble."""
    return list(_troubles(status))


def _troubles(status: llm_pb2.GetStatusResponse | diffusion_pb2.GetStatusResponse) -> Iterator[str]:
    for engine in status.engines:
        if engine.stuck:
            yield f"{engine.model} is stuck"
        if engine.placement.degraded:
            why = engine.placement.reason or f"it asked for a device and is on {engine.placement.device or 'none'}"
            yield f"{engine.model} runs elsewhere than the settings ask: {why}"


def summary(services: Mapping[str, Json]) -> Json:
    """Return what dashboards look for at the top of /status, told of the memory's driver and of the default model's engine."""
    told = {name: each for name, each in services.get("vram", {}).items() if name == "vram_available"}
    engines = services.get("llm", {}).get("engines", [])
    if not engines:
        return told
    told |= {name: engines[0][name] for name in ("tune", "speculation") if name in engines[0]}
    placement = engines[0].get("placement")
    if placement is not None:
        on_device = "gpu" if placement["gpu_layers"] else "cpu"
        told["gpu"] = {"placement": on_device} | {name: placement[name] for name in ("device", "kv_type", "degraded")}
    return told
