"""Envoy's ext_proc messages: what the gate reads in them, and its answers, serialised beforehand where they can be."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from envoy_subset import ext_proc_pb2 as pb

from services.admission.core.gating import Answer, body
from services.kit.access import CLIENT_KEY, REQUEST_ID_KEY, TIER_KEY, TRACEPARENT_KEY
from services.kit.wire.callouts import envelope

ASK_KEY: Final = "x-omniserve-ask"
ADMITTED_KEY: Final = "x-omniserve-admitted"
OVERFLOW_KEY: Final = "x-omniserve-overflow"
SATURATED: Final = "saturated"

REQUEST_HEADERS: Final = 0x12
"""First byte of a message with the request's head."""

_OVERWRITE: Final = pb.HeaderValueOption.APPEND_ACTION_OVERWRITE_IF_EXISTS_OR_ADD
# What is different for every request as it stands in a message, with the lengths that Envoy makes and lets through.
_ID_START: Final = b"\n\x0c" + REQUEST_ID_KEY.encode() + b"\x1a"
_LONGEST_ID: Final = 127  # its length is one byte then; the listeners' own have 36, services of the mesh bring theirs
_TRACE_START: Final = b"\n\x0b" + TRACEPARENT_KEY.encode() + b"\x1a\x37"
_TRACE_LENGTH: Final = 55


class Head(NamedTuple):
    """The headers by which the gate decides."""

    ask: str
    tier: str
    client: str


class Apart(NamedTuple):
    """A request's message without what is different for every request, and that: its id and its trace, "" for none."""

    message: bytes
    request_id: str
    traceparent: str


def apart(message: bytes) -> Apart:
    """Return a request's message taken apart.

    What is left is the same for equal asks, so it is what the gate remembers decisions by. No header value holds the
    control characters that it is found by: Envoy refuses such requests.
    """
    traceparent = ""
    found = message.find(_TRACE_START)
    if found >= 0:
        start, stop = found + len(_TRACE_START), found + len(_TRACE_START) + _TRACE_LENGTH
        traceparent = message[start:stop].decode("ascii", "replace")
        message = message[:start] + message[stop:]
    found = message.find(_ID_START)
    if found < 0:
        return Apart(message, "", traceparent)
    start = found + len(_ID_START)
    length = message[start]
    if length > _LONGEST_ID:
        return Apart(message, "", traceparent)
    stop = start + 1 + length
    request_id = message[start + 1 : stop].decode("ascii", "replace")
    return Apart(message[:start] + message[stop:], request_id, traceparent)


def head(message: bytes) -> Head:
    """Return what a request's message says. Raises DecodeError."""
    found = {
        each.key: each.raw_value.decode("utf-8", "replace") or each.value
        for each in pb.ProcessingRequest.FromString(message).request_headers.headers.headers
    }
    return Head(found.get(ASK_KEY, ""), found.get(TIER_KEY, ""), found.get(CLIENT_KEY, ""))


def admitted(side: str) -> bytes:
    """Return the answer that lets a request through to the clusters of one side (`e0` or `e1`)."""
    mutation = pb.HeaderMutation(set_headers=[_header(ADMITTED_KEY, side)], remove_headers=[ASK_KEY])
    common = pb.CommonResponse(header_mutation=mutation, clear_route_cache=True)
    return _sent(pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common)))


def instead(answer: Answer, request_id: str) -> bytes:
    """Return an answer to the caller in the worker's place."""
    headers = [_header("content-type", "application/json")]
    if answer.retry_after_s is not None:
        headers.append(_header("retry-after", str(answer.retry_after_s)))
    if answer.is_saturated:
        headers.append(_header(OVERFLOW_KEY, SATURATED))
    immediate = pb.ImmediateResponse(
        status=pb.HttpStatus(code=answer.status),
        headers=pb.HeaderMutation(set_headers=headers),
        body=body(answer, request_id),
        details=f"admission_{answer.reason}",
    )
    return _sent(pb.ProcessingResponse(immediate_response=immediate))


def _header(key: str, value: str) -> pb.HeaderValueOption:
    return pb.HeaderValueOption(header=pb.HeaderValue(key=key, raw_value=value.encode()), append_action=_OVERWRITE)


def _sent(response: pb.ProcessingResponse) -> bytes:
    return envelope(response.SerializeToString())


def _carry_on() -> Sequence[tuple[int, bytes]]:
    """Answers to what the gate is not configured to be asked, by the message's first byte."""
    headers = pb.HeadersResponse(response=pb.CommonResponse())
    trailers = pb.TrailersResponse()
    return (
        (0x1A, _sent(pb.ProcessingResponse(response_headers=headers))),
        (0x22, _sent(pb.ProcessingResponse(request_body=pb.BodyResponse()))),
        (0x2A, _sent(pb.ProcessingResponse(response_body=pb.BodyResponse()))),
        (0x32, _sent(pb.ProcessingResponse(request_trailers=trailers))),
        (0x3A, _sent(pb.ProcessingResponse(response_trailers=trailers))),
    )


CARRY_ON: Final = dict(_carry_on())
"""What is answered to events that the gate has nothing to do with."""
