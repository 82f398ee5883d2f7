"""Trees of plain values as YAML text and back."""

from typing import Any, Final, TypeAlias

import yaml

Node: TypeAlias = "str | int | float | bool | list[Node] | dict[str, Node] | None"

# The same in C where the library has it, some ten times as fast.
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BASE: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Plain(_BASE):  # type: ignore[misc]  # one of two classes
    """Writes repeated nodes in full: what Envoy shows in an error is then where it stands."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def to_text(node: Node) -> str:
    """Return the node as YAML without anchors, keys in their order."""
    text: str = yaml.dump(node, Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True)
    return text


def from_text(text: str) -> Any:  # noqa: ANN401 - any YAML value
    """Return what the YAML text says. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_LOADER)  # noqa: S506 - one of the two safe ones
