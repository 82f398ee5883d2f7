"""Failures of llm become errors that speak of the fields of the REST request."""

from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError, Reason

# The contract's places of what the REST request has at the top, longest first.
_PLACES = (
    ("options.sampling.", ""),
    ("options.limits.", ""),
    ("options.structure.", "response_format."),
    ("options.", ""),
    ("prompt.tokens.ids", "prompt"),
    ("prompt.text", "prompt"),
    ("template_variables", "chat_template_kwargs"),
)


def rest_field(path: str) -> str:
    """Return the REST name of a field that the contract names by its path."""
    for theirs, ours in _PLACES:
        if path.startswith(theirs):
            return ours + path.removeprefix(theirs)
    return path


def as_rest(error: DomainError) -> DomainError:
    """Return the error with the caller's own field names, in the sentence too; an unknown model gets OpenAI's code."""
    field, message, metadata = error.field, error.message, dict(error.metadata)
    if field is not None:
        renamed = rest_field(field)
        message, field = message.replace(f"'{field}'", f"'{renamed}'"), renamed
    if error.reason is Reason.NOT_FOUND and field == "model":
        metadata["code"] = "model_not_found"
    return DomainError(error.reason, message, field=field, retry_after_ms=error.retry_after_ms, metadata=metadata)


def error_of(failed: llm_pb2.Failed, *, chat: bool) -> DomainError:
    """Return the error that ended a request of a session; the prompt of a chat is made of its messages."""
    try:
        reason = Reason(failed.reason)
    except ValueError:  # a newer llm may know more reasons than we do
        reason = Reason.INTERNAL
    field = failed.field if failed.HasField("field") else None
    return as_rest(
        DomainError(
            reason,
            failed.message,
            field="messages" if chat and field == "prompt" else field,
            retry_after_ms=failed.retry_after_ms if failed.HasField("retry_after_ms") else None,
        )
    )


def model_not_found(name: str) -> DomainError:
    """Return the refusal of a model that is not in the catalogue."""
    return DomainError(
        Reason.NOT_FOUND,
        f"The model '{name[:256]}' does not exist; GET /v1/models lists those that do.",
        field="model",
        metadata={"code": "model_not_found"},
    )
