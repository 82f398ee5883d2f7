"""Settings: every knob once, with its default, unit and a sentence; wrong or unknown variables stop the start.

A room declares `class LlmSettings(MeshSettings): service = "llm"` and its knobs; `load(LlmSettings)` reads
`OMNISERVE_LLM_<KNOB>` from the environment. Building the class directly reads no environment: that is for tests.
"""

import difflib
import json
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, SecretStr, ValidationError
from pydantic.fields import Field, FieldInfo

NAMESPACE: Final = "OMNISERVE_"
# Services that others call; each has an address below.
PEERS: Final = ("admission", "diffusion", "jobs", "llm", "relay", "vram")
_ROOT: Final = Path(__file__).resolve().parents[2]


class SettingsError(Exception):
    """Settings that cannot be used; `problems` has one sentence for each, naming its variable."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting as it is documented. `names`: every accepted variable, the one that wins first; `name`: the one shown."""

    name: str
    names: tuple[str, ...]
    field: str
    default: str
    unit: str
    sentence: str
    secret: bool
    shared: bool


def knob(
    default: Any,  # noqa: ANN401 - of the field's own type
    sentence: str,
    *,
    unit: str | None = None,
    aliases: Sequence[str] = (),
    secret: bool = False,
    shared: bool = False,
    ge: float | None = None,
    le: float | None = None,
    gt: float | None = None,
    lt: float | None = None,
) -> Any:  # noqa: ANN401 - stands where a field's default stands
    """Declare one setting.

    `aliases` are further accepted variables, full names; the prefixed name wins over them. `secret` values are never
    shown; their type is SecretStr. `shared` marks what every service knows: the first alias is the documented name.
    """
    extra = {"unit": unit or "", "aliases": tuple(aliases), "secret": secret, "shared": shared}
    bounds = {name: bound for name, bound in (("ge", ge), ("le", le), ("gt", gt), ("lt", lt)) if bound is not None}
    return Field(default=default, description=sentence, json_schema_extra={"knob": extra}, **bounds)  # type: ignore[call-overload]


def body_limit_knob(sentence: str) -> Any:  # noqa: ANN401 - as knob
    """Declare the largest request body: one variable and the same bounds for everybody who counts bodies.

    90 MiB is what Envoy keeps of a request that may be sent again.
    """
    return knob(80, sentence, unit="MiB", aliases=("OMNISERVE_BODY_LIMIT_MIB",), ge=1, le=90)


class ServiceSettings(BaseModel):
    """Base of a room's settings: a frozen value. Subclasses set `service`; the variables' prefix is OMNISERVE_<SERVICE>_."""

    # defer_build: only the one class a process uses is worth what pydantic's schema of it costs.
    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True, defer_build=True
    )

    service: ClassVar[str]

    @classmethod
    def prefix(cls) -> str:
        """Return the prefix of its variables."""
        return f"{NAMESPACE}{cls.service.upper().replace('-', '_')}_"


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"is no address: write host:port with a port of 0 to 65535, not {value!r}")
    return value


Address = Annotated[str, AfterValidator(_address)]


class MeshSettings(ServiceSettings):
    """What every service of the mesh knows."""

    state_dir: Path = knob(
        _ROOT / "run",
        "Directory of run-time state: tokens, logs, Envoy's files.",
        aliases=("OMNISERVE_STATE_DIR",),
        shared=True,
    )
    log_level: Literal["debug", "info", "warning", "error"] = knob(
        "info", "Least severe log line that is written.", aliases=("OMNISERVE_LOG_LEVEL",), shared=True
    )
    check_tokens: bool = knob(
        True,  # noqa: FBT003 - the default
        "Whether callers must show a service token; may be off only while the service listens on loopback.",
        aliases=("OMNISERVE_CHECK_TOKENS",),
        shared=True,
    )
    drain_grace_s: float = knob(
        8.0,
        "How long running calls may go on after a stop signal; below the 10 s after which process managers kill.",
        unit="s",
        aliases=("OMNISERVE_DRAIN_GRACE_S",),
        shared=True,
        ge=0,
        le=3600,
    )
    otlp_endpoint: str = knob(
        "",
        "Where traces are sent over OTLP/gRPC, e.g. http://127.0.0.1:4317; empty turns tracing off.",
        aliases=("OTEL_EXPORTER_OTLP_ENDPOINT",),
        shared=True,
    )
    admission_address: Address = knob(
        "127.0.0.1:9101", "Where admission is called.", aliases=("OMNISERVE_ADMISSION_ADDRESS",), shared=True
    )
    diffusion_address: Address = knob(
        "127.0.0.1:9104", "Where diffusion is called.", aliases=("OMNISERVE_DIFFUSION_ADDRESS",), shared=True
    )
    jobs_address: Address = knob(
        "127.0.0.1:9107", "Where jobs is called.", aliases=("OMNISERVE_JOBS_ADDRESS",), shared=True
    )
    llm_address: Address = knob(
        "127.0.0.1:9103", "Where llm is called.", aliases=("OMNISERVE_LLM_ADDRESS",), shared=True
    )
    relay_address: Address = knob(
        "127.0.0.1:9105", "Where relay is called.", aliases=("OMNISERVE_RELAY_ADDRESS",), shared=True
    )
    vram_address: Address = knob(
        "127.0.0.1:9102", "Where vram is called.", aliases=("OMNISERVE_VRAM_ADDRESS",), shared=True
    )
    edge_address: Address = knob(
        "127.0.0.1:8792",
        "Where Envoy's operator listener is called, for its counters.",
        aliases=("OMNISERVE_EDGE_ADDRESS",),
        shared=True,
    )


S = TypeVar("S", bound=ServiceSettings)


def load(cls: type[S], environ: Mapping[str, str] | None = None) -> S:
    """Read the settings of one service from the environment (default: the process's).

    Raises SettingsError with a sentence for each bad value and for each variable with the service's own prefix that no
    room knows.
    """
    environ = os.environ if environ is None else environ
    problems = _unknown(cls, environ)
    try:
        settings = cls(**_given(cls, environ))
    except ValidationError as error:
        raise SettingsError([*problems, *_bad_values(cls, error, environ)]) from None
    if problems:
        raise SettingsError(problems)
    return settings


def check_environment(classes: Iterable[type[ServiceSettings]], environ: Mapping[str, str]) -> None:
    """Check every variable of the namespace OMNISERVE_ against all rooms, and every value.

    Raises SettingsError naming each variable that no class knows, with the nearest known name, and each bad value.
    """
    classes = tuple(classes)
    known = known_variables(*classes)
    problems = [_unknown_sentence(name, known) for name in sorted(environ) if _ours(name) and name not in known]
    for cls in classes:
        try:
            cls(**_given(cls, environ))
        except ValidationError as error:
            problems += [p for p in _bad_values(cls, error, environ) if p not in problems]
    if problems:
        raise SettingsError(problems)


def known_variables(*classes: type[ServiceSettings]) -> dict[str, Knob]:
    """Return every accepted variable of the classes with the knob it sets."""
    return {name: each for cls in classes for each in knobs(cls) for name in each.names}


def knobs(cls: type[ServiceSettings]) -> list[Knob]:
    """Return the knobs of a class in the order they are declared, shared ones last."""
    found = [_knob(cls, name, field) for name, field in cls.model_fields.items()]
    return sorted(found, key=lambda each: each.shared)


def settings_table(cls: type[ServiceSettings], *, shared: bool = False) -> str:
    """Return the knobs as a Markdown table: the room's own, or with `shared` those every service knows."""
    rows = ["| variable | default | unit | what it does |", "| --- | --- | --- | --- |"]
    for each in knobs(cls):
        if each.shared is shared:
            others = [name for name in each.names if name != each.name and not each.shared]
            also = f" Also accepted: {', '.join(f'`{name}`' for name in others)}." if others else ""
            rows.append(f"| `{each.name}` | {each.default} | {each.unit} | {each.sentence}{also} |")
    return "\n".join(rows)


def _given(cls: type[ServiceSettings], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the knobs that are set, by field: the first variable of each that has a text.

    Set but empty counts as not set: `VAR=${VAR:-}` is common in compose files.
    """
    found: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        text = next(filter(None, map(environ.get, _names(cls, name, field))), None)
        if text is not None:
            found[name] = _split(text) if _is_sequence(field.annotation) else text
    return found


def _knob(cls: type[ServiceSettings], name: str, field: FieldInfo) -> Knob:
    extra = _extra(cls, name, field)
    names = _names(cls, name, field)
    secret = bool(extra["secret"])
    if secret != (SecretStr in _types_in(field.annotation)):
        raise TypeError(f"{cls.__name__}.{name}: a secret knob is of type SecretStr, and nothing else is")
    return Knob(
        name=names[1] if extra["shared"] else names[0],
        names=names,
        field=name,
        default="(secret)" if secret else _shown(field.default),
        unit=str(extra["unit"]),
        sentence=field.description or "",
        secret=secret,
        shared=bool(extra["shared"]),
    )


def _extra(cls: type[ServiceSettings], name: str, field: FieldInfo) -> dict[str, Any]:
    extra = field.json_schema_extra
    if not isinstance(extra, dict) or "knob" not in extra:
        raise TypeError(f"{cls.__name__}.{name} is not declared with knob(...)")
    return typing.cast("dict[str, Any]", extra["knob"])


def _names(cls: type[ServiceSettings], name: str, field: FieldInfo) -> tuple[str, ...]:
    return (f"{cls.prefix()}{name.upper()}", *_extra(cls, name, field)["aliases"])


def _shown(default: Any) -> str:  # noqa: ANN401 - of any field's type
    if isinstance(default, Path) and default.is_relative_to(_ROOT):
        default = f"./{default.relative_to(_ROOT)}"
    if isinstance(default, bool):
        default = int(default)
    if isinstance(default, frozenset):
        default = sorted(default)
    if isinstance(default, (tuple, list)):
        default = ",".join(str(each) for each in default)
    return "(none)" if default is None or default == "" else f"`{default}`"


def _is_sequence(annotation: Any) -> bool:  # noqa: ANN401 - a type or a typing construct
    return bool({typing.get_origin(part) or part for part in _types_in(annotation)} & {tuple, list, frozenset, set})


def _types_in(annotation: Any) -> set[Any]:  # noqa: ANN401 - a type or a typing construct
    """Return an annotation and, for unions, its members."""
    members = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
    return {annotation, *members} if typing.get_origin(annotation) is not tuple else {annotation}


def _split(text: str) -> Any:  # noqa: ANN401 - JSON
    if text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            return text  # the validator will say what is wrong with it
    return [part.strip() for part in text.split(",") if part.strip()]


def _bad_values(cls: type[ServiceSettings], error: ValidationError, environ: Mapping[str, str]) -> list[str]:
    by_field = {each.field: each for each in knobs(cls)}
    problems = []
    for item in error.errors(include_url=False, include_context=False):
        each = by_field[str(item["loc"][0])] if item["loc"] else None
        if each is None:  # a rule over several knobs: the validator's sentence names them
            problems.append(f"{cls.__name__}: {item['msg'].removeprefix('Value error, ')}")
            continue
        name = next((name for name in each.names if environ.get(name)), each.name)
        value = "" if each.secret else f" {environ.get(name, '')!r}:"
        problems.append(f"{name}:{value} {item['msg'].removeprefix('Value error, ')}")
    return problems


def _ours(name: str) -> bool:
    return name.startswith(NAMESPACE)


def _unknown(cls: type[ServiceSettings], environ: Mapping[str, str]) -> list[str]:
    known = known_variables(cls)
    # Where a service is called is a setting of its callers, which every mesh has.
    called = {f"{NAMESPACE}{peer.upper()}_ADDRESS" for peer in (*PEERS, "facade")}
    strangers = [
        name for name in sorted(environ) if name.startswith(cls.prefix()) and name not in known and name not in called
    ]
    if not strangers:
        return []
    # Another room may use a name with this room's prefix (a peer's address, a seed's name): ask before refusing.
    from services.kit.settings_docs import discover  # noqa: PLC0415 - imports every room: only on this suspicion

    known |= known_variables(*discover())
    return [_unknown_sentence(name, known) for name in strangers if name not in known]


def _unknown_sentence(name: str, known: Mapping[str, Knob]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{name}: no such setting{hint}"
