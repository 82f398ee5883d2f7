"""Live endpoints: whose they are, how long they last, and beside what they may stand."""

from dataclasses import replace

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from services.kit.errors import DomainError, Reason
from services.relay.core.addresses import parse_address
from services.relay.core.endpoints import (
    MOST_ENDPOINTS,
    MOST_OWNERS,
    Contribution,
    Live,
    Owned,
    merged,
    next_end,
    pass_over,
    with_contribution,
    with_drained,
    without_ended,
    without_local,
)
from services.relay.core.model import Credential, Group, GroupKind, Upstream
from tests.fixtures.amounts import amount

LOCAL, OVERFLOW, MANAGED = GroupKind.LOCAL, GroupKind.OVERFLOW, GroupKind.MANAGED
OWN = Credential("authorization", "Bearer own")
OTHER = Credential("authorization", "Bearer other")


def upstream(name="image", local=(), overflow=(), **more):
    groups = (
        Group(LOCAL, tuple(map(parse_address, local)), **more),
        Group(OVERFLOW, tuple(map(parse_address, overflow)), tiers=frozenset({"paid"}), credential=OWN),
    )
    return Upstream(name, name, groups)


def given(*addresses, generation=1, ends_at=60.0, credential=None):
    return Contribution(tuple(map(parse_address, addresses)), credential, generation, ends_at)


def put(live, contribution, *, to=None, owner="capacity/image", kind=OVERFLOW, now=0.0, name="image"):
    return with_contribution(live, Owned(name, kind, owner), contribution, {"image": to or upstream()}, now)


def addresses(upstream, kind=OVERFLOW):
    return [each.address for each in next(group for group in upstream.groups if group.kind is kind).endpoints]


def refusal(*arguments, **more):
    with pytest.raises(DomainError) as caught:
        put(*arguments, **more)
    return caught.value.reason, caught.value.field


def test_an_owners_endpoints_join_those_of_the_settings():
    to = upstream(overflow=["https://a.example.com"])
    found = merged(to, put(Live(), given("https://b.example.com"), to=to)).group(OVERFLOW)
    assert [(each.address, each.owner) for each in found.endpoints] == [
        ("https://a.example.com:443", ""),
        ("https://b.example.com:443", "capacity/image"),
    ]
    assert (found.credential, found.tiers) == (OWN, {"paid"})


def test_endpoints_come_on_the_groups_terms_where_the_settings_have_none():
    found = merged(upstream(), put(Live(), given("https://b.example.com"))).group(OVERFLOW)
    assert (found.credential, found.tiers) == (OWN, {"paid"})


def test_an_owner_replaces_all_it_gave_and_nothing_of_others():
    live = put(Live(), given("https://a.example.com", "https://b.example.com"))
    live = put(live, given("https://z.example.com"), owner="capacity/other")
    live = put(live, given("https://c.example.com", generation=2))
    assert addresses(merged(upstream(), live)) == ["https://c.example.com:443", "https://z.example.com:443"]
    live = put(live, given(generation=3))
    assert addresses(merged(upstream(), live)) == ["https://z.example.com:443"]


def test_an_older_generation_is_refused_even_after_everything_was_taken_away():
    live = put(put(Live(), given("https://a.example.com", generation=5)), given(generation=6))
    assert refusal(live, given("https://a.example.com", generation=5)) == (Reason.CONFLICT, "generation")
    live = without_ended(put(live, given("https://a.example.com", generation=7, ends_at=9)), 10)
    assert refusal(live, given("https://a.example.com", generation=6)) == (Reason.CONFLICT, "generation")


def test_the_same_list_again_only_lasts_longer():
    live = put(Live(), given("https://a.example.com", ends_at=60))
    again = put(live, given("https://a.example.com", ends_at=90))
    assert merged(upstream(), again) == merged(upstream(), live)
    assert (next_end(live), next_end(again)) == (60, 90)


def test_endpoints_end_with_their_time_and_not_before():
    live = put(Live(), given("https://a.example.com", ends_at=60))
    live = put(live, given("https://b.example.com", ends_at=70), owner="capacity/other")
    assert without_ended(live, 59.9) is live
    assert addresses(merged(upstream(), without_ended(live, 60))) == ["https://b.example.com:443"]
    assert next_end(without_ended(live, 60)) == 70
    assert next_end(without_ended(live, 70)) is None


def test_unknown_upstreams_and_groups_are_not_found():
    assert refusal(Live(), given("https://a.example.com"), name="imge") == (Reason.NOT_FOUND, "upstream")
    assert refusal(Live(), given("https://a.example.com"), kind=MANAGED) == (Reason.NOT_FOUND, "group")


@pytest.mark.parametrize(
    "strangers",
    [
        given("https://b.example.com", credential=OTHER),
        given("http://10.0.0.1:1"),
        given("https://b.example.com/v2"),
    ],
)
def test_what_cannot_share_a_cluster_is_refused(strangers):
    to = upstream(overflow=["https://a.example.com"])
    assert refusal(Live(), strangers, to=to) == (Reason.INVALID_REQUEST, "endpoints")
    live = put(Live(), given("https://c.example.com"), owner="capacity/other")
    assert refusal(live, strangers) == (Reason.INVALID_REQUEST, "endpoints")


def test_the_groups_own_credential_and_another_owners_are_two_things():
    live = put(Live(), given("https://a.example.com", credential=OTHER))
    assert refusal(live, given("https://b.example.com"), owner="capacity/other") == (
        Reason.INVALID_REQUEST,
        "endpoints",
    )


def test_an_owner_may_replace_its_own_by_others_of_another_kind():
    live = put(Live(), given("https://a.example.com", credential=OTHER))
    assert merged(upstream(), live).group(OVERFLOW).credential == OTHER
    live = put(live, given("http://10.0.0.1:1/v2", generation=2))
    assert merged(upstream(), live).group(OVERFLOW).credential == OWN


def test_mixed_repeated_and_too_many_endpoints_are_refused():
    many = given(*(f"http://10.0.0.1:{port}" for port in range(1, MOST_ENDPOINTS + 2)))
    for wrong in (given("http://10.0.0.1:1", "http://10.0.0.1:2/x"), given("http://a:1", "http://a:1"), many):
        assert refusal(Live(), wrong) == (Reason.INVALID_REQUEST, "endpoints")
    live = Live()
    for number in range(MOST_OWNERS):
        live = put(live, given(f"http://10.0.0.2:{number + 1}"), owner=str(number))
    assert refusal(live, given("http://10.0.0.3:1"), owner="one more") == (Reason.INVALID_REQUEST, "endpoints")
    put(live, given("http://10.0.0.3:1", generation=2), owner="0")


def test_a_credential_never_goes_where_changed_settings_would_send_it():
    live = put(Live(), given("https://rented.example.com", credential=OTHER))
    changed = upstream(overflow=["https://a.example.com"])
    found = merged(changed, live).group(OVERFLOW)
    assert ([each.address for each in found.endpoints], found.credential) == (["https://a.example.com:443"], OWN)


def test_an_endpoint_of_the_settings_is_not_doubled():
    to = upstream(overflow=["https://a.example.com"])
    assert addresses(merged(to, put(Live(), given("https://a.example.com"), to=to))) == ["https://a.example.com:443"]


def test_endpoints_are_drained_and_put_back():
    to = upstream(local=["http://a:1", "http://b:1"])
    upstreams = {"image": to}
    live = with_drained(Live(), upstreams, "image", "http://a:1", drained=True)
    assert [each.draining for each in merged(to, live).group(LOCAL).endpoints] == [True, False]
    assert with_drained(live, upstreams, "image", "http://a:1", drained=True) == live
    back = with_drained(live, upstreams, "image", "http://a:1", drained=False)
    assert merged(to, back) == to
    assert with_drained(back, upstreams, "image", "http://a:1", drained=False) == back


def test_live_endpoints_can_be_drained_too():
    live = put(Live(), given("https://a.example.com"))
    live = with_drained(live, {"image": upstream()}, "image", "https://a.example.com:443", drained=True)
    assert merged(upstream(), live).group(OVERFLOW).endpoints[0].draining


@pytest.mark.parametrize(("name", "address"), [("imge", "http://a:1"), ("image", "http://z:1")])
def test_what_does_not_exist_cannot_be_drained(name, address):
    with pytest.raises(DomainError) as caught:
        with_drained(Live(), {"image": upstream(local=["http://a:1"])}, name, address, drained=True)
    assert caught.value.reason is Reason.NOT_FOUND


def test_the_local_group_is_passed_over_while_memory_lacks_and_comes_back_with_a_margin():
    local_first = upstream(local=["http://a:1"], overflow=["https://b.example.com"], min_free_mib=800)
    everybody = replace(local_first.groups[1], tiers=frozenset())
    local_first = replace(local_first, groups=(local_first.groups[0], everybody))
    assert pass_over(local_first, 799, passed_before=False)
    assert not pass_over(local_first, 800, passed_before=False)
    assert pass_over(local_first, 899, passed_before=True)
    assert not pass_over(local_first, 900, passed_before=True)
    assert without_local(local_first).group(LOCAL) is None


def test_unknown_memory_is_no_reason_to_pass_over():
    paid_only = upstream(local=["http://a:1"], overflow=["https://b.example.com"], min_free_mib=800)
    everybody = replace(paid_only, groups=(paid_only.groups[0], replace(paid_only.groups[1], tiers=frozenset())))
    assert not pass_over(everybody, None, passed_before=True)
    assert not pass_over(paid_only, 1, passed_before=False)
    assert not pass_over(replace(everybody, groups=everybody.groups[:1]), 1, passed_before=False)


ADDRESSES = ("https://a.example.com", "https://b.example.com", "https://c.example.com/v1", "http://10.0.0.1:1")
CHANGES = st.tuples(
    st.sampled_from(["x", "y"]),
    st.lists(st.sampled_from(ADDRESSES), max_size=2, unique=True),
    st.sampled_from([None, OWN, OTHER]),
    st.integers(1, 4),
    st.floats(0, 10),
)


@settings(max_examples=amount(120, thorough=500))
@for_all(st.lists(CHANGES, max_size=8), st.sets(st.sampled_from(ADDRESSES[:2])), st.sampled_from([None, OWN]))
def test_whatever_owners_and_settings_do_each_endpoint_gets_only_what_it_was_given_for(changes, written, credential):
    """Changes come in turn, one a second; then the settings change to `written` with `credential`."""
    live, seen = Live(), {}
    for now, (owner, names, wanted, generation, ttl_s) in enumerate(changes):
        contribution = given(*names, generation=generation, ends_at=now + ttl_s, credential=wanted)
        try:
            live = put(live, contribution, owner=owner, now=now)
        except DomainError:
            continue
        assert generation >= seen.get(owner, 0)
        seen[owner] = generation
    live = without_ended(live, len(changes))
    group = Group(OVERFLOW, tuple(map(parse_address, sorted(written))), credential=credential)
    found = merged(Upstream("image", "image", (Group(LOCAL, ()), group)), live).groups[1]
    for endpoint in found.endpoints:
        contribution = live.contributions.get(Owned("image", OVERFLOW, endpoint.owner))
        meant = credential if contribution is None else contribution.credential or credential
        assert found.credential == meant
        assert contribution is None or contribution.ends_at > len(changes)
    assert len({(each.scheme, each.path_prefix) for each in found.endpoints}) <= 1
