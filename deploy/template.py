"""Fills a YAML template's placeholders with typed values. Pure.

The template is read as data before anything is filled in, so a value can be a number, a list or a whole subtree, and no value
can break out of its place.
"""

import re
from collections.abc import Mapping

from services.kit.yaml_text import Node, from_text

PLACEHOLDER = re.compile(r"\$\{([A-Z0-9_]+)\}")
SHARED = "x-shared"


class TemplateError(Exception):
    """A placeholder without a value, or a value without a placeholder."""


class _Absent:
    """Stands for a node that vanishes together with its key or list entry."""


_ABSENT = _Absent()


def fill(template: str, values: Mapping[str, Node]) -> dict[str, Node]:
    """Return the template's tree with every `${NAME}` replaced by `values["NAME"]`.

    A node that is nothing but a placeholder takes the value's type; a value of None removes the node. The top-level key
    `x-shared` (home of YAML anchors) is dropped. Raises TemplateError for unknown and unused names.
    """
    tree = from_text(template)
    used: set[str] = set()
    filled = _filled_pairs({key: node for key, node in tree.items() if key != SHARED}, values, used)
    if unused := sorted(set(values) - used):
        raise TemplateError(f"no place for {', '.join(unused)} in the template")
    return filled


def _filled(node: Node, values: Mapping[str, Node], used: set[str]) -> "Node | _Absent":
    if isinstance(node, dict):
        return _filled_pairs(node, values, used)
    if isinstance(node, list):
        children = (_filled(child, values, used) for child in node)
        return [child for child in children if not isinstance(child, _Absent)]
    if isinstance(node, str):
        return _filled_text(node, values, used)
    return node


def _filled_pairs(pairs: Mapping[str, Node], values: Mapping[str, Node], used: set[str]) -> dict[str, Node]:
    children = ((key, _filled(child, values, used)) for key, child in pairs.items())
    return {key: child for key, child in children if not isinstance(child, _Absent)}


def _filled_text(text: str, values: Mapping[str, Node], used: set[str]) -> "Node | _Absent":
    def value_of(match: re.Match[str]) -> Node:
        name = match.group(1)
        if name not in values:
            raise TemplateError(f"no value for ${{{name}}}")
        used.add(name)
        return values[name]

    if whole := PLACEHOLDER.fullmatch(text):
        value = value_of(whole)
        return _ABSENT if value is None else value
    return PLACEHOLDER.sub(lambda match: str(value_of(match)), text)
