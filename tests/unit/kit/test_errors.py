import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2

from services.kit.errors import (
    DETAILS_KEY,
    STATUS,
    DomainError,
    Reason,
    find_domain_error,
    from_rpc_error,
    to_status,
)


def sent(error: DomainError) -> grpc.aio.AioRpcError:
    """Return the error as gRPC hands it to the peer."""
    trailing = grpc.aio.Metadata((DETAILS_KEY, to_status(error).SerializeToString()))
    return grpc.aio.AioRpcError(error.code, None, trailing, details=error.message)


def plain(code: grpc.StatusCode, details: str = "") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


def test_every_reason_has_a_status_code():
    assert set(STATUS) == set(Reason)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_survives_the_way_to_the_peer(reason):
    error = DomainError(reason, "12 of 10", field="n", retry_after_ms=1500, metadata={"limit": "10"})
    read = from_rpc_error(sent(error))
    assert (read.reason, read.message, read.field, read.retry_after_ms) == (reason, "12 of 10", "n", 1500)
    assert dict(read.metadata) == {"limit": "10"}


def test_the_status_carries_one_error_info_of_our_domain():
    status = to_status(DomainError(Reason.QUEUE_FULL, "10000 wait", retry_after_ms=7))
    info = error_details_pb2.ErrorInfo()
    assert len(status.details) == 1
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == ("queue_full", "omniserve", {"retry_after_ms": "7"})
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


def test_a_peer_that_is_down_becomes_the_reason_the_caller_chose():
    error = from_rpc_error(plain(grpc.StatusCode.UNAVAILABLE), unavailable=Reason.ADMISSION_UNAVAILABLE)
    assert error.reason is Reason.ADMISSION_UNAVAILABLE
    assert from_rpc_error(plain(grpc.StatusCode.UNAVAILABLE)).reason is Reason.UPSTREAM_FAILED


def test_a_peer_that_says_unavailable_itself_keeps_its_own_reason():
    draining = sent(DomainError(Reason.DRAINING, "on the way out"))
    assert from_rpc_error(draining, unavailable=Reason.ADMISSION_UNAVAILABLE).reason is Reason.DRAINING


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, Reason.UPSTREAM_TIMEOUT),
        (grpc.StatusCode.CANCELLED, Reason.CANCELLED),
        (grpc.StatusCode.UNKNOWN, Reason.INTERNAL),
        (grpc.StatusCode.DATA_LOSS, Reason.INTERNAL),
        (grpc.StatusCode.UNIMPLEMENTED, Reason.UNSUPPORTED),
    ],
)
def test_a_status_without_our_details_is_read_by_its_code(code, reason):
    assert from_rpc_error(plain(code, "x")).reason is reason


def test_a_message_over_the_size_limit_is_told_from_a_full_queue():
    too_large = plain(grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (99 vs. 9)")
    assert from_rpc_error(too_large).reason is Reason.TOO_LARGE
    assert from_rpc_error(plain(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")).reason is Reason.SATURATED


@pytest.mark.parametrize("details", [b"", b"\xff\xff\xff", "text"])
def test_details_that_cannot_be_read_are_no_reason_to_fail(details):
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.NOT_FOUND, None, grpc.aio.Metadata((DETAILS_KEY, details)), details="gone"
    )
    assert from_rpc_error(error).reason is Reason.NOT_FOUND


def test_a_reason_this_version_does_not_know_is_read_by_its_code():
    status = to_status(DomainError(Reason.NOT_FOUND, "gone"))
    status.details[0].Pack(error_details_pb2.ErrorInfo(reason="from_the_future", domain="omniserve"))
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.NOT_FOUND, None, grpc.aio.Metadata((DETAILS_KEY, status.SerializeToString()))
    )
    assert from_rpc_error(error).reason is Reason.NOT_FOUND


def test_a_very_long_message_is_cut_so_that_the_header_stays_small():
    status = to_status(DomainError(Reason.INVALID_REQUEST, "x" * 100_000))
    assert len(status.SerializeToString()) < 2_000


def test_a_group_of_domain_errors_is_read_as_its_first_and_a_mixed_group_is_not():
    mine, other = DomainError(Reason.NOT_FOUND, "a"), ValueError("b")
    assert find_domain_error(ExceptionGroup("g", [ExceptionGroup("h", [mine])])) is mine
    assert find_domain_error(ExceptionGroup("g", [mine, other])) is None
    assert find_domain_error(other) is None
