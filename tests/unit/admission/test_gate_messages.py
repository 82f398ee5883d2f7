"""A request's message is taken apart into what equal asks share and what is its own."""

from envoy_subset import ext_proc_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from services.admission import gate_messages

ASK, TIER, CLIENT = "route=tts.speech;upstream=tts;modality=tts", "paid", "alice"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
visible = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=40)


def message(request_id, trace, others=(), *, client=CLIENT):
    """Return what Envoy sends of a request with these headers, None for none."""
    own = {"x-omniserve-ask": ASK, "x-omniserve-tier": TIER, "x-omniserve-client": client}
    pairs = [*own.items(), *others]
    if request_id is not None:
        pairs.append(("x-request-id", request_id))
    if trace is not None:
        pairs.insert(1, ("traceparent", trace))
    headers = [pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in pairs]
    found = pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=headers)))
    return found.SerializeToString()


@given(st.uuids(), st.uuids())
def test_equal_asks_are_equal_whatever_their_id_and_trace(one, other):
    first = gate_messages.apart(message(str(one), f"00-{one.hex}-b7ad6b7169203331-01"))
    second = gate_messages.apart(message(str(other), f"00-{other.hex}-b7ad6b7169203331-00"))
    assert (first.request_id, second.request_id) == (str(one), str(other))
    assert first.traceparent == f"00-{one.hex}-b7ad6b7169203331-01"
    # The lengths of what was around them stay: they are equal where ids and traces have one length, as they do.
    assert first.message == second.message


def test_a_request_that_is_not_traced_has_no_trace():
    found = gate_messages.apart(message("r1", None))
    assert (found.request_id, found.traceparent) == ("r1", "")


@given(visible.filter(bool), visible)
def test_a_client_cannot_fake_an_id_or_a_trace_of_its_own(client, told):
    others = [("x-omniserve-other", told)]
    found = gate_messages.apart(message("r1", TRACE, others, client=client))
    assert (found.request_id, found.traceparent) == ("r1", TRACE)
    assert gate_messages.head(message("r1", TRACE, others, client=client)).client == client
