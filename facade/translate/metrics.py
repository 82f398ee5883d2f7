"""GET /metrics: what services tell about themselves, in Prometheus's text format. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

Json = Mapping[str, Any]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class _Family:
    """A metric. `label`: what tells its values apart, when it has several."""

    name: str
    help: str
    label: str = ""


_VRAM: Final = (
    _Family(
        "omniserve_vram_free_gib", "Free memory of all devices as their driver says, GiB; -1 when it does not answer."
    ),
    _Family("omniserve_vram_headroom_mb", "What every tier can lease now, MiB; absent while a driver does not answer."),
    _Family("omniserve_vram_leases", "Leases that are held."),
    _Family("omniserve_vram_leased_mb", "Memory that is leased, MiB."),
    _Family("omniserve_vram_denials_total", "Leases that were denied."),
    _Family("omniserve_vram_lease_expiries_total", "Leases that nobody renewed in time."),
    _Family("omniserve_vram_evictions_total", "Leases that ended early, by reason.", label="reason"),
)
_PICTURES: Final = {
    "images_total": _Family("omniserve_images_total", "Pictures made.", "model"),
    "steps_total": _Family("omniserve_image_steps_total", "Denoise calls made for pictures.", "model"),
    "steps_replayed_total": _Family("omniserve_image_steps_replayed_total", "Denoise calls saved by replay.", "model"),
    "cancelled_total": _Family(
        "omniserve_image_cancelled_total", "Requests for pictures ended by their caller.", "model"
    ),
    "crashes_total": _Family("omniserve_image_crashes_total", "Times a picture engine died or hung.", "model"),
}
_CACHES: Final = {
    "hits_total": _Family("omniserve_teleport_hits_total", "Found in an exact cache.", "layer"),
    "misses_total": _Family("omniserve_teleport_misses_total", "Not found in an exact cache.", "layer"),
    "entries": _Family("omniserve_teleport_entries", "What an exact cache holds.", "layer"),
}


def exposition(services: Mapping[str, Json]) -> str:
    """Return the metrics of services by name, each as /status shows it."""
    return "".join(f"{line}\n" for line in _lines(services))


def _lines(services: Mapping[str, Json]) -> Iterator[str]:
    yield from _family(
        _Family("omniserve_service_stale", "1 while a service does not answer, and its figures are old.", "service"),
        {name: each.get("stale", False) for name, each in services.items()},
    )
    vram = services.get("vram", {})
    if "vram_available" in vram:
        told = "Whether the driver of every device answers: tells 0 free from unreachable."
        yield from _family(_Family("omniserve_vram_available", told), vram["vram_available"])
    for family in _VRAM:
        if family.name in vram:
            yield from _family(family, vram[family.name])
    engines = services.get("llm", {}).get("engines", [])
    if engines:
        told = "1 while a model's weights are on the CPU, or fewer on the device, against the settings."
        degraded = any(each.get("placement", {}).get("degraded", False) for each in engines)
        yield from _family(_Family("omniserve_gpu_degraded", told), degraded)
    yield from _pictures(services.get("diffusion", {}))


def _pictures(diffusion: Json) -> Iterator[str]:
    """Yield the figures of the engines of pictures and of their exact caches."""
    engines = diffusion.get("engines", [])
    layers = diffusion.get("teleport", {}).get("layers", [])
    for name, family in _PICTURES.items() if engines else ():
        yield from _family(family, {each["model"]: each[name] for each in engines})
    for name, family in _CACHES.items() if layers else ():
        told = {each["layer"].removeprefix("TELEPORT_LAYER_").lower(): each[name] for each in layers}
        yield from _family(family, told)


def _family(family: _Family, value: Any) -> Iterator[str]:  # noqa: ANN401 - a number, or numbers by label
    yield f"# HELP {family.name} {family.help}"
    yield f"# TYPE {family.name} {'counter' if family.name.endswith('_total') else 'gauge'}"
    if not family.label:
        yield f"{family.name} {_number(value)}"
        return
    for label, each in value.items():
        yield f'{family.name}{{{family.label}="{_escaped(label)}"}} {_number(each)}'


def _number(value: float) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
