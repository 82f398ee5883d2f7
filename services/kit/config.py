"""omniserve.yaml: the structured half of the settings, read so that every fault has its line.

A room asks for its section with a pydantic model of its own; the kit knows the sections' names and nothing inside them.
Reading is one function of the text, so a file can be checked before it is used.
"""

import difflib
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from services.kit.lean import Later
from services.kit.settings import SettingsError, knob

if TYPE_CHECKING:
    import yaml
else:
    yaml = Later("yaml")  # most processes have no such file

SECTIONS: Final = ("models", "upstreams", "routes", "keys", "lanes", "reserves")
# Top-level keys for the writer's own use: places for YAML anchors.
_PRIVATE: Final = "x-"
# A file within this says everything; what is above is aliases that multiply.
_MOST_NODES: Final = 100_000
_DEEPEST: Final = 64
_MOST_BYTES: Final = 4 * 1024 * 1024
_PLAIN_TAGS: Final = frozenset({"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"})

T = TypeVar("T")
Place = tuple[str | int, ...]


def config_knob() -> Any:  # noqa: ANN401 - stands where a field's default stands
    """Return the knob of the file, for every room that reads a section of it; its type is `Path | None`."""
    return knob(
        None,
        "File with what is structured: upstreams, routes, keys, models, lanes, reserves; absent means none.",
        aliases=("OMNISERVE_CONFIG",),
    )


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with the settings. `line` is None when it came from the environment, `file` is then empty."""

    file: str
    line: int | None
    setting: str
    message: str

    def __str__(self) -> str:
        where = ":".join(str(part) for part in (self.file, self.line) if part not in ("", None))
        return ": ".join(part for part in (where, self.setting, self.message) if part)


class ConfigError(SettingsError):
    """Settings that cannot be used; one fault for each thing that is wrong."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__([str(fault) for fault in faults])
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file. `lines`: where each value stands, by its path of keys and indices. Without a file it is empty."""

    file: str = ""
    data: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    lines: Mapping[Place, int] = field(default_factory=lambda: MappingProxyType({}))

    def section(self, name: str, kind: type[T]) -> T | None:
        """Return a section as a value of `kind` (a model, or a list or mapping of models); None when it is absent or empty.

        Raises ConfigError with a fault for each field that is unknown, missing or wrong.
        """
        if self.data.get(name) is None:
            return None
        try:
            return TypeAdapter(kind).validate_python(self.data[name])
        except ValidationError as error:
            items = error.errors(include_url=False, include_context=False, include_input=False)
            raise ConfigError(_distinct(self._refused(name, kind, item) for item in items)) from None

    def without(self, name: str, is_others: Callable[[Any], bool]) -> "Document":
        """Return the document without the items of a section's list that are somebody else's; lines stay those of the file."""
        items = self.data.get(name)
        if not isinstance(items, list):
            return self
        kept = [place for place, item in enumerate(items) if not is_others(item)]
        moved = {old: new for new, old in enumerate(kept)}
        lines: dict[Place, int] = {}
        for path, line in self.lines.items():
            if len(path) < 2 or path[0] != name:
                lines[path] = line
            elif path[1] in moved:
                lines[(name, moved[int(path[1])], *path[2:])] = line
        return Document(self.file, {**self.data, name: [items[place] for place in kept]}, lines)

    def fault(self, path: Place, message: str) -> Fault:
        """Return a fault at a value of the file, or at the nearest one around it."""
        return Fault(self.file, self._line(path), _dotted(self._known_part(path)), message)

    def _refused(self, name: str, kind: Any, item: Mapping[str, Any]) -> Fault:  # noqa: ANN401 - a type
        path: Place = (name, *item["loc"])
        if item["type"] == "extra_forbidden":
            known = _field_names(kind, item["loc"][:-1])
            return self.fault(path, f"no such setting{_hint(str(path[-1]), known)}")
        if item["type"] == "missing":
            inner = self._known_part(path[:-1])
            return Fault(self.file, self._line(inner), _dotted(inner), f"needs `{path[-1]}`")
        return self.fault(path, _sentence(item["msg"]))

    def _known_part(self, path: Place) -> Place:
        """Return the path without what pydantic adds to it: names of union members and validators."""
        real: Place = ()
        for part in path:
            if (*real, part) in self.lines:
                real = (*real, part)
        return real

    def _line(self, path: Place) -> int | None:
        return self.lines.get(self._known_part(path))


def read(path: Path | None) -> Document:
    """Return the parsed file, or an empty document for None. Raises ConfigError, also when it cannot be read."""
    if path is None:
        return Document()
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1).decode("utf-8")
    except OSError as error:
        raise ConfigError([Fault(str(path), None, "", f"cannot be read: {error.strerror or error}")]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([Fault(str(path), None, "", f"is no UTF-8 text: byte {error.start}")]) from None
    return parse(text, str(path))


def parse(text: str, file: str) -> Document:
    """Return the document of a text. Raises ConfigError for bad YAML, repeated keys and unknown sections."""
    if len(text) > _MOST_BYTES:
        raise ConfigError([Fault(file, None, "", f"is larger than {_MOST_BYTES} bytes")])
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return Document(file)
        reader = _Reader(loader, file)
        data = reader.value(root, ())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else None
        raise ConfigError([Fault(file, line, "", f"is no YAML: {error.problem or error.context}")]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError([Fault(file, None, "", f"is no YAML: {message}")]) from None
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise ConfigError([Fault(file, 1, "", f"must be sections, such as `{SECTIONS[1]}:`")])
    document = Document(file, data, reader.lines)
    strangers = [name for name in data if name not in SECTIONS and not name.startswith(_PRIVATE)]
    faults = [
        *reader.faults,
        *(document.fault((name,), f"no such section{_hint(name, SECTIONS)}") for name in strangers),
    ]
    if faults:
        raise ConfigError(sorted(faults, key=lambda fault: fault.line or 0))
    return document


class _Reader:
    """Turns YAML's nodes into plain values and remembers the line of each."""

    def __init__(self, loader: "yaml.SafeLoader", file: str) -> None:
        self._loader = loader
        self._file = file
        self._nodes = 0
        self.lines: dict[Place, int] = {}
        self.faults: list[Fault] = []

    def value(self, node: "yaml.Node", path: Place) -> Any:  # noqa: ANN401 - any YAML value
        """Return the node's value. Raises ValueError when there are too many of them, or one within itself."""
        self._nodes += 1
        if self._nodes > _MOST_NODES or len(path) > _DEEPEST:
            raise ValueError(f"more than {_MOST_NODES} values, or nested deeper than {_DEEPEST}")
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN_TAGS:
            raise yaml.MarkedYAMLError(problem=f"tag {node.tag} is not allowed", problem_mark=node.start_mark)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._loader.construct_object(node)

    def _mapping(self, node: "yaml.MappingNode", path: Place) -> dict[str, Any]:
        self._refuse_repeats(node, path)
        self._loader.flatten_mapping(node)  # `<<`: what is merged comes first, so that the mapping's own keys win
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            found[key] = self.value(value_node, (*path, key))
        return found

    def _refuse_repeats(self, node: "yaml.MappingNode", path: Place) -> None:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = self._key(key_node), key_node.start_mark.line + 1
            if key in seen and key != "<<":
                setting = _dotted((*path, key))
                self.faults.append(Fault(self._file, line, setting, f"is set twice, first in line {seen[key]}"))
            seen.setdefault(key, line)

    def _key(self, node: "yaml.Node") -> str:
        """Return a key as it is written: `3d` and `on` are names here, not numbers or truths."""
        if not isinstance(node, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=node.start_mark)
        return str(node.value)


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that is most like a wrong one, or None when none is."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5) or [each for each in known if name in each]
    return near[0] if near else None


def _hint(name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    if near is not None:
        return f"; did you mean `{near}`?"
    return f"; there are {', '.join(f'`{each}`' for each in known)}" if known else ""


def _sentence(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:] if message.startswith("Input ") else message


def _dotted(path: Place) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _distinct(faults: Iterator[Fault]) -> list[Fault]:
    """Return the faults without repeats: each member of a union reports the same one."""
    return list(dict.fromkeys(faults))


def _field_names(kind: Any, loc: Sequence[Hashable]) -> list[str]:  # noqa: ANN401 - a type
    """Return the names that the model at a place within a type knows."""
    kinds = [kind]
    for part in loc:
        # A part that leads nowhere is the name of a union's member: the place stays the same.
        kinds = [inner for each in kinds for inner in _inner(each, part)] or kinds
    models = [each for outer in kinds for each in _members(outer) if _is_model(each)]
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def _inner(kind: Any, part: Hashable) -> list[Any]:  # noqa: ANN401 - a type
    found: list[Any] = []
    for each in _members(kind):
        arguments = typing.get_args(each)
        if _is_model(each):
            if part in each.model_fields:
                found.append(each.model_fields[part].annotation)
        elif arguments:
            is_item = isinstance(part, int) or issubclass(typing.get_origin(each) or object, Mapping)
            found += [arguments[-1] if arguments[-1] is not Ellipsis else arguments[0]] if is_item else []
    return found


def _members(kind: Any) -> list[Any]:  # noqa: ANN401 - a type
    """Return a union's members; any other type is its only one. Annotated types are those that they annotate."""
    if typing.get_origin(kind) is typing.Annotated:
        return _members(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, _UNION):
        return [member for each in typing.get_args(kind) for member in _members(each)]
    return [kind]


_UNION: Final = type(int | str)


def _is_model(kind: Any) -> bool:  # noqa: ANN401 - a type
    return isinstance(kind, type) and issubclass(kind, BaseModel)
