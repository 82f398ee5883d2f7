"""Failures of llm become errors that speak of the fields of the REST request."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError, Reason

SCHEMA: Final = "response_format.json_schema.schema"
"""Where OpenAI has the schema of an answer."""
# The contract's places of what the REST request has at the top, longest first.
_PLACES = (
    ("options.sampling.", ""),
    ("options.limits.", ""),
    ("options.structure.json_schema.schema_json", SCHEMA),
    ("options.structure.grammar", "grammar"),
    ("options.structure.", "response_format."),
    ("options.structure", "response_format"),
    ("options.", ""),
    ("prompt.tokens.ids", "prompt"),
    ("prompt.text", "prompt"),
    ("template_variables", "chat_template_kwargs"),
)


def rest_field(path: str) -> str:
    """Return the REST name of a field that the contract names by its path."""
    if path.startswith("tools["):
        tool, _, rest = path.partition(".")
        return f"{tool}.function.{rest.replace('parameters_json', 'parameters', 1)}"
    for theirs, ours in _PLACES:
        if path.startswith(theirs):
            return ours + path.removeprefix(theirs)
    return path


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the caller's request a message of the contract comes from, and each of its parts."""

    message: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Names:
    """What one request's caller calls the fields of the contract.

    `fields`: names beside those of completions, by these. `messages`: where the contract's messages come from, if they
    are not the caller's own. `schema`: where the schema of the answer is.
    """

    fields: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    messages: tuple[Place, ...] = ()
    schema: str = SCHEMA

    def of(self, path: str) -> str:
        """Return the caller's name of a field that the contract names by its path."""
        path = rest_field(path)
        if path.startswith(SCHEMA):
            path = self.schema + path.removeprefix(SCHEMA)
        found = _MESSAGE.match(path)
        if found and int(found["message"]) < len(self.messages):
            place = self.messages[int(found["message"])]
            part = int(found["part"]) if found["part"] else len(place.parts)
            return place.parts[part] if part < len(place.parts) else place.message
        top = _TOP.match(path)
        name = top.group() if top else path
        return self.fields.get(name, name) + path.removeprefix(name)


_MESSAGE: Final = re.compile(r"messages\[(?P<message>\d{1,9})\](?:\.content\[(?P<part>\d{1,9})\])?")
_TOP: Final = re.compile(r"[^.\[]+")
OWN_NAMES: Final = Names()
CHAT_NAMES: Final = Names({"prompt": "messages"})
"""The prompt of a chat is made of its messages."""


def as_rest(error: DomainError, names: Names) -> DomainError:
    """Return the error with the caller's own field names, in the sentence too; an unknown model gets OpenAI's code."""
    return _renamed(error, names.of)


def _renamed(error: DomainError, rename: Callable[[str], str]) -> DomainError:
    field, message, metadata = error.field, error.message, dict(error.metadata)
    if field is not None:
        renamed = rename(field)
        message, field = message.replace(f"'{field}'", f"'{renamed}'"), renamed
    if error.reason is Reason.NOT_FOUND and field == "model":
        metadata["code"] = "model_not_found"
    return DomainError(error.reason, message, field=field, retry_after_ms=error.retry_after_ms, metadata=metadata)


@contextmanager
def naming(rename: Callable[[str], str]) -> Iterator[None]:
    """Let errors of the block name their fields by a route's own names."""
    try:
        yield
    except DomainError as error:
        raise _renamed(error, rename) from None


def error_of(failed: llm_pb2.Failed) -> DomainError:
    """Return the error that ended a request of a session, with the contract's field names."""
    try:
        reason = Reason(failed.reason)
    except ValueError:  # a newer llm may know more reasons than we do
        reason = Reason.INTERNAL
    return DomainError(
        reason,
        failed.message,
        field=failed.field if failed.HasField("field") else None,
        retry_after_ms=failed.retry_after_ms if failed.HasField("retry_after_ms") else None,
    )


def model_not_found(name: str) -> DomainError:
    """Return the refusal of a model that is not in the catalogue."""
    return DomainError(
        Reason.NOT_FOUND,
        f"The model '{name[:256]}' does not exist; GET /v1/models lists those that do.",
        field="model",
        metadata={"code": "model_not_found"},
    )
