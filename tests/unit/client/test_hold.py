"""A lease as its holder sees it."""

from omniserve.vram.v1 import vram_pb2 as pb
from omniserve_client.hold import hold
from omniserve_client.terms import Terms, sizes_of

TERMS = Terms("t", {"": 100}, min_mib=50, tier="sub", ttl_s=30, purpose="p", wait_s=1.5, key="k")
GRANT = pb.LeaseResponse(granted=True, lease_id="a", items=[pb.LeasedItem(device="gpu1", size_mib=80)], ttl_s=30)


def held():
    return hold(TERMS, GRANT, 1000.0)


def test_the_ask_says_all_that_was_said():
    request = TERMS.request({})
    assert (request.tenant, request.ttl_s, request.wait_ms, request.idempotency_key) == ("t", 30, 1500, "k")
    assert (request.items[0].size_mib, request.items[0].min_size_mib) == (100, 50)
    assert not request.items[0].HasField("device")
    assert not Terms("t", {"": 1}).request({}).tier


def test_it_is_renewed_at_a_third_of_its_ttl_counted_from_when_the_last_call_was_sent():
    ours = held()
    assert ours.next_renewal_in(1000.0) == 10.0
    assert ours.next_renewal_in(1011.0) == 0.0
    ours.renewed(pb.RenewResponse(lease=pb.LeaseState(ttl_s=60)), 1011.0)
    assert ours.next_renewal_in(1011.0) == 20.0


def test_a_broker_that_does_not_answer_is_asked_again_until_the_ttl_is_over():
    ours, pauses = held(), []
    for _ in range(7):
        assert not ours.failed("away", 1010.0)
        pauses.append(round(ours.next_renewal_in(1010.0), 3))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert ours.next_renewal_in(1029.5) == 0.5
    assert not ours.failed("away", 1029.9)
    assert ours.failed("away", 1030.0)
    assert "within its TTL of 30 s: away" in ours.why_lost


def test_what_the_broker_has_forgotten_is_asked_for_anew_with_what_is_allocated():
    ours = held()
    ours.allocated["gpu1"] = 70
    request = ours.again()
    assert [(each.device, each.size_mib, each.materialised_mib) for each in request.items] == [("gpu1", 80, 70)]
    assert request.idempotency_key
    assert request.idempotency_key != "k"
    assert ours.regained(pb.LeaseResponse(granted=True, lease_id="b", ttl_s=20), 1005.0)
    assert (ours.lease_id, ours.ttl_s, ours.is_lost) == ("b", 20, False)
    assert not ours.regained(pb.LeaseResponse(denied=pb.Denied(message="no room")), 1006.0)
    assert "no room" in ours.why_lost


def test_sizes_are_one_number_or_a_number_for_each_device():
    assert sizes_of(5, None) == {"": 5}
    assert sizes_of(5, "gpu1") == {"gpu1": 5}
    assert sizes_of({"gpu0": 1, "gpu1": 2}, None) == {"gpu0": 1, "gpu1": 2}
