import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.admission.core import identity
from services.admission.core.identity import Allowed, Book, Denied, Policy
from services.admission.core.model import Tier
from services.kit.errors import Reason
from services.kit.keyring import Key, digest

NOW = 1_800_000_000.0
BOOK = Book.of(
    [
        Key("alice", digest("alice-key"), "sub"),
        Key("batch", digest("batch-key"), "background"),
        Key("old", digest("old-key"), "paid", expires=NOW),
        Key("bad", digest("bad-key"), "paid", revoked=NOW - 10),
    ],
    secret="sesame",
)


def judge(key: str | None, asked: str = "", anonymous: Tier | None = None, book: Book = BOOK) -> identity.Verdict:
    return identity.judge_public("" if key is None else digest(key), asked, book, anonymous, NOW)


# ---- where a key may be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "path"),
    [
        ({"authorization": "Bearer k"}, "/"),
        ({"authorization": "bearer k"}, "/"),
        ({"authorization": "BEARER   k "}, "/"),
        ({"x-api-key": "k"}, "/"),
        ({"x-rapid-api-key": "k"}, "/"),
        ({"secret": "k"}, "/"),
        ({}, "/v1/models?secret=k"),
        ({}, "/v1/models?a=b&secret=%6b&c"),
    ],
)
def test_each_of_the_five_places_holds_a_key(headers, path):
    assert identity.shown_key(headers, path) == "k"


def test_the_first_place_that_holds_a_key_wins():
    places = {"authorization": "Bearer 1", "x-api-key": "2", "x-rapid-api-key": "3", "secret": "4"}
    path = "/?secret=5"
    for number, name in enumerate(identity.KEY_HEADERS, 1):
        assert identity.shown_key(places, path) == str(number)
        del places[name]
    assert identity.shown_key(places, path) == "5"


@pytest.mark.parametrize(
    ("headers", "path"),
    [
        ({}, "/v1/models"),
        ({}, "/secret=k"),
        ({}, "/?secrets=k&xsecret=k&Secret=k&a=secret=k"),
        ({}, "/?%73ecret=k"),
        ({}, "/?secret=&secret"),
        ({"authorization": "Basic k"}, "/"),
        ({"authorization": "Bearer"}, "/"),
        ({"authorization": "k"}, "/"),
        ({"authorization": "", "x-api-key": " "}, "/"),
        ({"cookie": "secret=k"}, "/"),
    ],
)
def test_anything_else_holds_no_key(headers, path):
    assert identity.shown_key(headers, path) in (None, ",")


def test_an_empty_place_does_not_hide_the_next_one():
    assert identity.shown_key({"authorization": "Basic eA==", "x-api-key": "", "secret": "k"}, "/") == "k"


@pytest.mark.parametrize(
    ("headers", "path"),
    [
        ({"x-api-key": "alice-key,alice-key"}, "/"),
        ({"x-api-key": "alice-key,wrong"}, "/"),
        ({"x-api-key": ",alice-key"}, "/"),
        ({"authorization": "Bearer alice-key,Bearer alice-key"}, "/"),
        ({"authorization": "Bearer wrong, Bearer alice-key"}, "/"),
        ({}, "/?secret=alice-key&secret=alice-key"),
        ({}, "/?secret=&secret=alice-key"),
        ({"authorization": "Bearer wrong", "x-api-key": "alice-key"}, "/"),
    ],
)
def test_a_place_that_is_filled_twice_and_a_wrong_key_before_a_right_one_let_nobody_in(headers, path):
    verdict = judge(identity.shown_key(headers, path), anonymous=Tier.PAID)
    assert isinstance(verdict, Denied)
    assert verdict.reason is Reason.UNAUTHENTICATED


@given(st.text(), st.dictionaries(st.sampled_from(identity.KEY_HEADERS), st.text()))
def test_whatever_is_sent_is_read_without_an_error_and_nothing_unknown_gets_in(path, headers):
    key = identity.shown_key(headers, path)
    assert key is None or isinstance(judge(key, anonymous=None), Denied)


# ---- whose key it is, and the tier -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "asked", "tier"),
    [
        ("alice-key", "paid", Tier.SUB),
        ("alice-key", "sub", Tier.SUB),
        ("alice-key", "free", Tier.FREE),
        ("alice-key", "background", Tier.BACKGROUND),
        ("alice-key", " PAID ", Tier.SUB),
        ("alice-key", "", Tier.SUB),
        ("batch-key", "paid", Tier.BACKGROUND),
        ("batch-key", "", Tier.BACKGROUND),
        ("sesame", "paid", Tier.PAID),
        ("sesame", "", Tier.FREE),
    ],
)
def test_a_key_asks_for_its_own_tier_or_a_lower_one(key, asked, tier):
    verdict = judge(key, asked)
    assert isinstance(verdict, Allowed)
    assert verdict.tier is tier


def test_the_client_is_the_name_of_the_key():
    assert judge("alice-key") == Allowed("alice", Tier.SUB)
    assert judge("sesame", "sub") == Allowed(identity.SHARED, Tier.SUB)


@pytest.mark.parametrize(
    ("key", "says"), [("nobody", "not known"), ("old-key", "'old' has expired"), ("bad-key", "'bad' has been revoked")]
)
def test_a_key_that_opens_nothing_is_refused_with_the_reason_also_where_anonymous_callers_get_in(key, says):
    for anonymous in (None, Tier.FREE, Tier.PAID):
        verdict = judge(key, anonymous=anonymous)
        assert isinstance(verdict, Denied)
        assert verdict.reason is Reason.UNAUTHENTICATED
        assert says in verdict.message
        assert key not in verdict.message


def test_a_tier_that_does_not_exist_is_told_apart_from_a_missing_key():
    verdict = judge("alice-key", "gold")
    assert isinstance(verdict, Denied)
    assert verdict.reason is Reason.INVALID_REQUEST
    assert "paid, sub, free, background" in verdict.message
    assert judge(None, "paid,free", Tier.PAID) != Allowed(identity.ANONYMOUS, Tier.PAID)


def test_a_text_that_is_revoked_once_is_revoked():
    book = Book.of([Key("a", digest("k"), "paid"), Key("b", digest("k"), "free", revoked=1.0)])
    assert isinstance(judge("k", book=book), Denied)


def test_without_a_secret_the_empty_key_opens_nothing():
    assert isinstance(judge("", book=Book.of([])), Denied)


# ---- nobody ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has_keys", "on_loopback", "allowed", "cap"),
    [
        (False, True, False, Tier.PAID),
        (False, True, True, Tier.PAID),
        (False, False, True, Tier.FREE),
        (False, False, False, None),
        (True, True, False, None),
        (True, True, True, Tier.FREE),
        (True, False, False, None),
        (True, False, True, Tier.FREE),
    ],
)
def test_who_has_no_key_gets_what_is_nobody_elses(has_keys, on_loopback, allowed, cap):
    assert Policy(allow_anonymous=allowed, on_loopback=on_loopback).anonymous(has_keys=has_keys) is cap


def test_the_tier_of_nobody_can_be_set_but_does_not_let_anybody_in():
    assert Policy(anonymous_tier="sub").anonymous(has_keys=False) is Tier.SUB
    assert Policy(anonymous_tier="sub", allow_anonymous=True).anonymous(has_keys=True) is Tier.SUB
    assert Policy(anonymous_tier="sub").anonymous(has_keys=True) is None


def test_anonymous_callers_are_capped_and_free_when_they_say_nothing():
    assert judge(None, "paid", Tier.FREE) == Allowed("anonymous", Tier.FREE)
    assert judge(None, "paid", Tier.PAID) == Allowed("anonymous", Tier.PAID)
    assert judge(None, "", Tier.PAID) == Allowed("anonymous", Tier.FREE)
    assert judge(None, "", Tier.BACKGROUND) == Allowed("anonymous", Tier.BACKGROUND)


def test_where_a_key_is_wanted_the_refusal_says_where_it_goes():
    verdict = judge(None)
    assert isinstance(verdict, Denied)
    assert "Authorization: Bearer" in verdict.message


# ---- the other doors ---------------------------------------------------------------------------------------------


def test_the_operator_is_the_owner_and_asks_for_any_tier():
    assert identity.judge_operator("", "paid", "") == Allowed("operator", Tier.PAID)
    assert identity.judge_operator(digest("whatever"), "", "") == Allowed("operator", Tier.FREE)


def test_an_operators_token_is_wanted_when_there_is_one():
    wanted = digest("tok")
    assert identity.judge_operator(digest("tok"), "sub", wanted) == Allowed("operator", Tier.SUB)
    for shown in ("", digest("tok2"), digest("sesame"), digest("")):
        verdict = identity.judge_operator(shown, "", wanted)
        assert isinstance(verdict, Denied)
        assert verdict.reason is Reason.UNAUTHENTICATED


def test_the_mesh_listener_knows_services_and_nobody_else():
    outsiders = frozenset({"envoy-public"})
    assert identity.judge_mesh("jobs", "paid", outsiders) == Allowed("jobs", Tier.PAID)
    unknown, outsider = identity.judge_mesh("", "", outsiders), identity.judge_mesh("envoy-public", "", outsiders)
    assert isinstance(unknown, Denied)
    assert unknown.reason is Reason.UNAUTHENTICATED
    assert isinstance(outsider, Denied)
    assert outsider.reason is Reason.FORBIDDEN


def test_a_policy_does_not_show_the_operators_token():
    assert "tok" not in repr(Policy(operator_token="tok")).replace("operator_token", "")
