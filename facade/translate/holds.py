"""POST /admin/hold and /admin/release: grants are stopped for a while, so that a co-tenant can use the device. Pure.

The seconds and modalities may stand in the query, as peers that hold each other's devices write them, or in the body.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from facade.translate.fields import Choice, Integer, ListOf, Text, refuse
from facade.translate.record import Field, record
from omniserve.admission.v1 import admission_pb2 as pb

_MODALITY: Final = "MODALITY_"
# As long as peers wait for a hold: what is in flight may end meanwhile.
_WAIT_MS: Final = 180_000
_WORDS: Final = tuple(
    name.removeprefix(_MODALITY).lower()
    for name in pb.Modality.keys()  # noqa: SIM118 - no mapping
    if not name.endswith("_UNSPECIFIED")
)
_ALSO: Final = {"3d": "three_d"}
_NUMBERS: Final = frozenset({"seconds", "wait_ms"})
_LISTS: Final = frozenset({"modalities", "exclude_permits"})

HOLD: Final = record(
    (
        Field("seconds", Integer(1, 3600), "How long at most.", required=True),
        Field("modalities", ListOf(Choice((*_WORDS, *_ALSO)), 1, 32), "What to stop; absent means everything."),
        Field("pool", Text(1, 16), "gpu0, gpu1, ... or cpu; absent means every pool."),
        Field("reason", Text(0, 256), "Shown in the status."),
        Field("hold_id", Text(1, 128), "Names the hold: the same name again extends it. Absent means a new one."),
        Field(
            "wait_ms",
            Integer(0, 3_600_000),
            "How long to wait for what is in flight, milliseconds; absent means 180000, and never longer than the hold.",
        ),
        Field(
            "exclude_permits", ListOf(Text(1, 128), 0, 64), "Permits that are not waited for, such as the caller's own."
        ),
    )
)
RELEASE: Final = record((Field("hold_id", Text(1, 128), "The hold; absent means all holds."),))


def read_hold(query: Iterable[tuple[str, str]], body: Mapping[str, Any]) -> pb.HoldRequest:
    """Translate a query and a body; DomainError invalid_request names the field at fault."""
    values = HOLD.read(_merged(query, body), "")
    wait_ms = min(values.get("wait_ms", _WAIT_MS), values["seconds"] * 1000)
    modalities = [_ALSO.get(word, word) for word in values.get("modalities", ())]
    return pb.HoldRequest(
        pool=values.get("pool"),
        seconds=values["seconds"],
        reason=values.get("reason", ""),
        modalities=[pb.Modality.Value(_MODALITY + word.upper()) for word in modalities],
        wait_ms=wait_ms,
        exclude_permits=values.get("exclude_permits", ()),
        hold_id=values.get("hold_id"),
    )


def read_release(query: Iterable[tuple[str, str]], body: Mapping[str, Any]) -> pb.ReleaseHoldRequest:
    """Translate a query and a body; DomainError invalid_request names the field at fault."""
    return pb.ReleaseHoldRequest(hold_id=RELEASE.read(_merged(query, body), "").get("hold_id"))


def hold_answer(response: pb.HoldResponse) -> dict[str, Any]:
    """Return the answer to a hold."""
    return {"hold_id": response.hold_id, "drained": response.drained, "in_flight": response.in_flight}


def _merged(query: Iterable[tuple[str, str]], body: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(body)
    for name, text in query:
        if name in merged:
            refuse(name[:60], "is there twice: give it once, in the query or in the body")
        merged[name] = _value(name, text)
    return merged


def _value(name: str, text: str) -> object:
    """Return what a parameter says: numbers are written in digits, lists with commas."""
    if name in _LISTS:
        return [part.strip() for part in text.split(",")]
    return int(text[:12]) if name in _NUMBERS and text.isascii() and text.isdecimal() else text
