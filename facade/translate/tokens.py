"""POST /tokenize and /detokenize: requests and answers.

OpenAI has no such routes. The names that clients of llama-server (`content`) and vLLM (`prompt`) use are accepted beside
ours, and answers carry them too.
"""

from collections.abc import Mapping
from typing import Any

from facade.translate.chat import TEMPLATE_FIELDS, conversation_of
from facade.translate.fields import Boolean, ListOf, Text, refuse
from facade.translate.messages import MESSAGES, TOKEN
from facade.translate.record import Field, record
from facade.translate.tools import TOOL_FIELDS
from omniserve.llm.v1 import llm_pb2

_MODEL = Field("model", Text(1, 256), "Catalogue name or alias; absent means the default model.")
_TEXTS = ("text", "content", "prompt")
_SPECIALS = {"add_special_tokens": "add_special", "parse_special_tokens": "parse_special"}

TOKENIZE = record(
    (
        _MODEL,
        Field("text", Text(), "The text to split. One of text and messages is required."),
        Field("content", Text(), "Another name of text."),
        Field("prompt", Text(), "Another name of text."),
        Field("messages", MESSAGES.reader, "A chat to split, through the model's template."),
        *TOOL_FIELDS,
        *TEMPLATE_FIELDS,
        Field("add_special", Boolean(), "Prepend the model's start token; absent means no for a text."),
        Field("add_special_tokens", Boolean(), "Another name of add_special."),
        Field("parse_special", Boolean(), "Read special-token names in the text as tokens; absent means yes."),
        Field("parse_special_tokens", Boolean(), "Another name of parse_special."),
        Field("with_pieces", Boolean(), "Return the text of each token too."),
    )
)
DETOKENIZE = record(
    (_MODEL, Field("tokens", ListOf(TOKEN), "Token ids of the model's vocabulary.", required=True)),
)


def read_tokenize(body: Mapping[str, Any]) -> tuple[llm_pb2.TokenizeRequest, bool]:
    """Translate a body into the request and whether pieces are wanted; DomainError invalid_request names the field."""
    values = TOKENIZE.read(body, "")
    values = {_SPECIALS.get(name, name): value for name, value in values.items()}
    given = [name for name in (*_TEXTS, "messages") if name in values]
    if not given:
        refuse("text", "is required: give 'text' or 'messages'", code="missing_required_parameter")
    if len(given) > 1:
        refuse(given[1], f"cannot be combined with '{given[0]}'")
    request = llm_pb2.TokenizeRequest(
        model=values.get("model", ""),
        add_special=values.get("add_special"),
        parse_special=values.get("parse_special"),
    )
    if given == ["messages"]:
        request.chat.CopyFrom(conversation_of(values))
    else:
        request.text = values[given[0]]
    return request, values.get("with_pieces", False)


def read_detokenize(body: Mapping[str, Any]) -> llm_pb2.DetokenizeRequest:
    """Translate a body; DomainError invalid_request names the field at fault."""
    values = DETOKENIZE.read(body, "")
    return llm_pb2.DetokenizeRequest(model=values.get("model", ""), tokens=values["tokens"])


def tokenized(response: llm_pb2.TokenizeResponse, *, with_pieces: bool) -> dict[str, Any]:
    """Translate the answer; a piece that is no whole character is given as its bytes."""
    answer: dict[str, Any] = {
        "object": "tokens",
        "tokens": list(response.tokens),
        "count": len(response.tokens),
        "max_model_len": response.context_tokens,
    }
    if with_pieces:
        answer["pieces"] = [_piece(piece) for piece in response.pieces]
    if response.HasField("prompt"):
        answer["prompt"] = response.prompt
    return answer


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def detokenized(response: llm_pb2.DetokenizeResponse) -> dict[str, Any]:
    """Translate the answer."""
    return {"object": "text", **dict.fromkeys(_TEXTS, response.text)}
