"""What serves a route: an upstream of its own, the engine of the mesh, the unified upstream, or nothing; and for whom."""

from dataclasses import replace

import pytest

from services.relay.core.model import (
    ANY_5XX,
    Endpoint,
    Group,
    GroupKind,
    RelayInputs,
    RouteOverride,
    Upstream,
)
from services.relay.core.planning import Target, plan, tier_rules

HERE = Endpoint("http", "127.0.0.1", 9001)
THERE = Endpoint("https", "api.example.com", 443)
LOCAL = Group(GroupKind.LOCAL, (HERE,), replay_statuses=ANY_5XX)
OVERFLOW = Group(GroupKind.OVERFLOW, (THERE,), tiers=frozenset({"paid"}))
MANAGED = Group(GroupKind.MANAGED, (THERE,), tiers=frozenset({"paid"}))
NOBODY = Group(GroupKind.LOCAL, ())


def upstreams(*given):
    return {each.name: each for each in given}


def planned(route_id, *given, **inputs):
    routes = plan(RelayInputs(upstreams(*given), **inputs))
    return next(route for route in routes if route.spec.route_id == route_id)


def fallbacks_by_tier(route):
    return {
        tier: None if rule.refused else [g.kind for g in rule.fallbacks]
        for rule in tier_rules(route)
        for tier in rule.tiers
    }


def test_without_upstreams_the_mesh_serves_what_it_can_and_nothing_the_rest():
    assert planned("llm.chat").target is Target.EMBEDDED
    assert planned("image.generations").target is Target.EMBEDDED
    assert planned("tts.speech").target is Target.DISABLED


def test_an_upstream_that_has_no_endpoints_is_not_configured():
    assert planned("tts.speech", Upstream("tts", "tts", (NOBODY,))).target is Target.DISABLED


def test_an_upstream_wins_over_the_engine_of_the_mesh():
    route = planned("llm.chat", Upstream("llm", "llm", (LOCAL,)))
    assert (route.target, route.proxied.upstream.name, route.proxied.gated) == (Target.PROXIED, "llm", True)


def test_pictures_come_from_their_upstream_unless_the_engine_is_preferred():
    for route_id in ("image.generations", "image.edits", "image.background_styles"):
        assert planned(route_id, Upstream("image", "image", (LOCAL,))).target is Target.PROXIED
        assert planned(route_id, Upstream("image", "image", (LOCAL,), prefer_embedded=True)).target is Target.EMBEDDED
    preferred = Upstream("image", "image", (LOCAL,), prefer_embedded=True)
    assert planned("worker.caption", preferred).target is Target.PROXIED


def test_the_engine_serves_if_it_is_preferred_and_the_upstream_the_routes_that_the_engine_has_not():
    llm = Upstream("llm", "llm", (LOCAL,), prefer_embedded=True)
    chat = planned("llm.chat", llm)
    assert chat.target is Target.EMBEDDED
    (other,) = plan(RelayInputs(upstreams(llm)), [replace(chat.spec, embedded=False)])
    assert other.target is Target.PROXIED


def test_the_unified_upstream_serves_what_nobody_else_does():
    unified = Upstream("default", "", (LOCAL,))
    tts = Upstream("tts", "tts", (LOCAL,))
    assert planned("llm.chat", unified).target is Target.EMBEDDED
    assert planned("tts.speech", unified, tts).proxied.upstream.name == "tts"
    assert planned("stt.transcriptions", unified, tts).proxied.upstream.name == "default"


def test_the_unified_upstream_is_not_taken_for_the_managed_one():
    assert planned("video.generations", Upstream("default", "", (LOCAL,))).target is Target.DISABLED


def test_the_image_workers_routes_go_to_the_image_upstream_when_there_is_no_worker():
    image, worker = Upstream("image", "image", (LOCAL,)), Upstream("image_worker", "image", (LOCAL,))
    assert planned("worker.caption", image).proxied.upstream.name == "image"
    assert planned("worker.caption", image, worker).proxied.upstream.name == "image_worker"


def test_routes_of_the_mesh_itself_are_nobodys_to_proxy():
    everything = Upstream("default", "", (LOCAL,))
    assert planned("mesh.models", everything).target is Target.EMBEDDED
    assert planned("jobs.r2v", everything).target is Target.DISABLED


def test_a_permit_is_due_for_a_local_worker_unless_it_costs_nothing():
    assert planned("tts.speech", Upstream("tts", "tts", (LOCAL,))).proxied.gated
    assert not planned("tts.speech", Upstream("tts", "tts", (LOCAL,), permits=0)).proxied.gated


def test_a_managed_service_takes_none_unless_it_is_told_to():
    assert not planned("video.generations", Upstream("h3", "video", (MANAGED,))).proxied.gated
    assert planned("video.generations", Upstream("h3", "video", (MANAGED,), permits=4)).proxied.gated


def test_tiers_that_may_not_use_the_managed_service_have_to_pay():
    route = planned("video.generations", Upstream("h3", "video", (MANAGED,), permits=0))
    assert fallbacks_by_tier(route) == {"paid": [], "sub": None, "free": None, "background": None}


def test_only_the_tiers_that_may_overflow_have_a_second_group():
    route = planned("tts.speech", Upstream("tts", "tts", (LOCAL, OVERFLOW)))
    assert fallbacks_by_tier(route) == {"paid": [GroupKind.OVERFLOW], "sub": [], "free": [], "background": []}


def test_the_rule_for_who_names_no_tier_is_that_of_free_and_comes_last():
    route = planned("tts.speech", Upstream("tts", "tts", (LOCAL, OVERFLOW)))
    assert "free" in tier_rules(route)[-1].tiers


def test_a_fallback_without_tiers_is_everybodys():
    fallback = Group(GroupKind.OVERFLOW, (THERE,))
    route = planned("stt.transcriptions", Upstream("stt", "stt", (LOCAL, fallback)))
    (rule,) = tier_rules(route)
    assert rule.fallbacks == (fallback,)


def test_a_forced_tier_decides_about_the_overflow_whatever_is_asked():
    image = Upstream("image", "image", (LOCAL, OVERFLOW))
    (rule,) = tier_rules(planned("image.backgrounds", image))
    assert rule.fallbacks == ()


def test_an_overflow_alone_serves_those_who_may_use_it_and_asks_the_others_to_pay():
    route = planned("tts.speech", Upstream("tts", "tts", (NOBODY, OVERFLOW)))
    assert route.proxied.main is OVERFLOW
    assert not route.proxied.gated
    assert fallbacks_by_tier(route) == {"paid": [], "sub": None, "free": None, "background": None}


def test_an_overflow_alone_does_not_take_the_routes_of_the_engine():
    assert planned("llm.chat", Upstream("llm", "llm", (NOBODY, OVERFLOW))).target is Target.EMBEDDED


@pytest.mark.parametrize("local", [(), (LOCAL,)], ids=["without a local worker", "with one that is not preferred"])
def test_an_overflow_helps_out_the_engine_on_the_routes_that_a_remote_knows(local):
    image = Upstream("image", "image", (*local, OVERFLOW), prefer_embedded=True)
    for route_id in ("image.generations", "image.edits", "image.variations"):
        route = planned(route_id, image)
        assert (route.target, route.backing, route.elsewhere.main) == (Target.EMBEDDED, None, OVERFLOW)
    for route_id in ("image.upscale", "image.backgrounds", "image.background_styles"):
        assert planned(route_id, image).elsewhere is None
    assert planned("llm.chat", Upstream("llm", "llm", (OVERFLOW,))).elsewhere is None
    assert planned("image.generations", Upstream("image", "image", local, prefer_embedded=True)).elsewhere is None


def test_a_path_setting_wins_over_the_routes_own_path_and_an_override_over_both():
    forecast = Upstream("forecast", "forecast", (LOCAL,))
    assert planned("forecast.forecasts", forecast).upstream_path == "/forecast"
    paths = {"OMNISERVE_FORECAST_PATH": "/predict"}
    assert planned("forecast.forecasts", forecast, paths=paths).upstream_path == "/predict"
    overrides = {"forecast.forecasts": RouteOverride(upstream_path="/other")}
    assert planned("forecast.forecasts", forecast, paths=paths, overrides=overrides).upstream_path == "/other"


def test_an_override_changes_terms_and_adds_headers_to_the_routes_own():
    override = RouteOverride(
        forced_tier="sub", paying_tiers=frozenset({"sub"}), timeout_ms=5, added_headers={"x-lab": "1"}
    )
    animation = Upstream("animation", "animation", (LOCAL,), timeout_ms=9)
    route = planned("animation.generations", animation, overrides={"animation.generations": override})
    assert (route.forced_tier, route.paying_tiers, route.timeout_ms) == ("sub", {"sub"}, 5)
    assert route.added_headers == {"x-animation-publish": "r2-searchable", "x-lab": "1"}


def test_a_route_that_is_not_proxied_has_no_upstream_to_ask_for():
    with pytest.raises(ValueError, match=r"llm\.chat"):
        _ = planned("llm.chat").proxied
