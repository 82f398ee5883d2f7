"""POST /v1/rerank, in the shape that Jina's and Cohere's clients, llama-server and vLLM share; with `texts` in that of TEI."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from facade.translate.embeddings import MODEL, USER, usage
from facade.translate.fields import Boolean, Custom, Integer, ListOf, Text, refuse, wrong_type
from facade.translate.record import Field, record
from omniserve.llm.v1 import llm_pb2

MAX_DOCUMENTS = 1000
_DOCUMENT = record((Field("text", Text(), "The document.", required=True),))


@dataclass(frozen=True, slots=True)
class RerankCall:
    """What is asked for. `with_documents`: results bring their documents along; `bare`: as text-embeddings-inference tells them."""

    request: llm_pb2.RerankRequest
    with_documents: bool
    bare: bool


def read_document(value: object, path: str) -> str:
    """Read a document: a string, or an object with one."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        wrong_type(path, "a string or an object with 'text'", value)
    text: str = _DOCUMENT.read(value, path)["text"]
    return text


_DOCUMENT_SCHEMA = {"oneOf": [{"type": "string"}, _DOCUMENT.schema()]}
RERANK = record(
    (
        Field("query", Text(1), "What is looked for.", required=True),
        Field(
            "documents",
            ListOf(Custom(read_document, _DOCUMENT_SCHEMA), 1, MAX_DOCUMENTS),
            "What is scored: strings, or objects with text.",
        ),
        Field(
            "texts",
            ListOf(Text(), 1, MAX_DOCUMENTS),
            "The same by text-embeddings-inference's name; the answer has that server's shape then.",
        ),
        MODEL,
        Field("top_n", Integer(1, 2**31 - 1), "Return the best N only; absent means all."),
        Field("return_documents", Boolean(), "Return each document with its score; absent means no."),
        Field("return_text", Boolean(), "The same, for 'texts'."),
    ),
    USER,
)


def read_rerank(body: Mapping[str, Any]) -> RerankCall:
    """Translate a body; DomainError invalid_request names the field at fault."""
    values = RERANK.read(body, "")
    bare = "texts" in values
    if bare and "documents" in values:
        refuse("texts", "cannot be combined with 'documents'")
    if not bare and "documents" not in values:
        refuse("documents", "is required", code="missing_required_parameter")
    request = llm_pb2.RerankRequest(
        model=values.get("model", ""),
        query=values["query"],
        documents=values["texts" if bare else "documents"],
        top_n=values.get("top_n"),
    )
    return RerankCall(request, values.get("return_text" if bare else "return_documents", False), bare)


def ranking(
    call: RerankCall, response: llm_pb2.RerankResponse, answer_id: str
) -> dict[str, Any] | list[dict[str, Any]]:
    """Translate the answer, best first."""
    if call.bare:
        return [_bare(call, each) for each in response.results]
    return {
        "id": answer_id,
        "object": "list",
        "model": response.model,
        "results": [_result(call, each) for each in response.results],
        "usage": usage(response.prompt_tokens),
    }


def _bare(call: RerankCall, ranked: llm_pb2.RankedDocument) -> dict[str, Any]:
    text = {"text": call.request.documents[ranked.index]} if call.with_documents else {}
    return {"index": ranked.index, "score": ranked.score} | text


def _result(call: RerankCall, ranked: llm_pb2.RankedDocument) -> dict[str, Any]:
    result: dict[str, Any] = {"index": ranked.index, "relevance_score": ranked.score}
    return result | ({"document": {"text": call.request.documents[ranked.index]}} if call.with_documents else {})
