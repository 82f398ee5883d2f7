"""What Envoy is told: which way each request goes, what it carries there, and what never leaves the mesh."""

import re
from dataclasses import replace

import pytest
from google.protobuf import descriptor_pool

from omniserve.admission.v1 import admission_pb2
from omniserve.diffusion.v1 import diffusion_pb2
from omniserve.llm.v1 import llm_pb2
from omniserve.options.v1 import options_pb2
from omniserve.relay.v1 import relay_pb2
from omniserve.vram.v1 import vram_pb2
from services.kit.access import BUILT_IN_SERVICES
from services.relay.core.model import (
    ANY_5XX,
    TIERS,
    Credential,
    Endpoint,
    Group,
    GroupKind,
    RelayInputs,
    RouteOverride,
    Upstream,
)
from services.relay.core.render import render
from services.relay.core.render_nodes import DoorFacts, seconds
from services.relay.core.render_whole import whole

SERVED = (llm_pb2, diffusion_pb2, admission_pb2, relay_pb2, vram_pb2)
DOOR = DoorFacts(("localhost",), "http://localhost:8792", 80, 600, checks_everybody=False, ca="/ca.crt")
HERE = Endpoint("http", "127.0.0.1", 9001)
THERE = Endpoint("https", "api.example.com", 443)
LOCAL = Group(GroupKind.LOCAL, (HERE,), replay_statuses=ANY_5XX)
OVERFLOW = Group(
    GroupKind.OVERFLOW, (THERE,), tiers=frozenset({"paid"}), credential=Credential("authorization", "Bearer 100%")
)


def rendered(*upstreams, door=DOOR, **inputs):
    return render(RelayInputs({each.name: each for each in upstreams}, **inputs), door, xds_dir="/xds")


def hosts(configuration, name):
    return next(host for host in configuration["virtual_hosts"] if host["name"] == name)


def routes(result, route_id, listener="public"):
    found = hosts(result.routes[listener], listener)["routes"]
    path = next(each.spec.path for each in result.plan if each.spec.route_id == route_id)
    return [each for each in found if each["match"].get("path") == path]


def cluster(result, name):
    return next(each for each in result.clusters if each["name"] == name)


def added(route):
    return {each["header"]["key"]: each["header"]["value"] for each in route.get("request_headers_to_add", [])}


def mutations(result, name):
    options = next(iter(cluster(result, name)["typed_extension_protocol_options"].values()))
    filters = options.get("http_filters", [])
    return filters[0]["typed_config"]["mutations"]["request_mutations"] if filters else []


def removed(result, name):
    return {each["remove"] for each in mutations(result, name) if "remove" in each}


def appended(result, name):
    return {
        m["append"]["header"]["key"]: m["append"]["header"]["value"] for m in mutations(result, name) if "append" in m
    }


def routed_services(result, listener):
    prefixes = [route["match"].get("prefix", "") for route in hosts(result.routes[listener], listener)["routes"]]
    return {match[1] for prefix in prefixes if (match := re.fullmatch(r"/([a-zA-Z0-9_.]+\.[A-Za-z]+)/", prefix))}


def services_with(*audiences):
    found = set()
    for module in SERVED:
        for service in module.DESCRIPTOR.services_by_name.values():
            methods = [method.GetOptions().Extensions[options_pb2.access].audience for method in service.methods]
            if set(audiences) & set(methods):
                found.add(service.full_name)
    return found


@pytest.mark.parametrize("listener", ["public", "mesh"])
def test_the_public_and_the_mesh_listener_route_exactly_the_services_with_public_rpcs(listener):
    assert routed_services(rendered(), listener) - BUILT_IN_SERVICES == services_with(options_pb2.AUDIENCE_PUBLIC)


def test_the_operator_listener_routes_exactly_the_services_with_rpcs_for_the_operator():
    wanted = services_with(options_pb2.AUDIENCE_PUBLIC, options_pb2.AUDIENCE_OPERATOR)
    assert routed_services(rendered(), "operator") - BUILT_IN_SERVICES == wanted


def test_every_routed_service_has_a_contract():
    for service in routed_services(rendered(), "operator") - BUILT_IN_SERVICES:
        assert descriptor_pool.Default().FindServiceByName(service)


def test_an_embedded_route_with_an_overflow_leads_to_the_facade_and_then_to_the_remote_for_those_who_may():
    result = rendered(Upstream("image", "image", (OVERFLOW,)))
    (route,) = routes(result, "image.generations")
    specifier = route["route"]["inline_cluster_specifier_plugin"]["extension"]["typed_config"]
    targets = [each["clusters"][0]["cluster_name"] for each in specifier["priority_groups"]]
    assert targets == ["facade", "image.overflow"]
    retries = route["route"]["retry_policy"]
    assert (retries["num_retries"], "5xx" in retries["retry_on"], "retriable_status_codes" in retries) == (
        1,
        False,
        False,
    )
    assert retries["retriable_headers"] == [{"name": "x-omniserve-overflow", "present_match": True}]
    assert added(route)["x-omniserve-mode"] == "try"
    assert "x-omniserve-service-token" in added(route)
    tiers = next(each for each in route["match"]["headers"] if each["name"] == "x-omniserve-tier")
    assert re.fullmatch(tiers["string_match"]["safe_regex"]["regex"], " Paid ")
    assert not re.fullmatch(tiers["string_match"]["safe_regex"]["regex"], "free")
    assert {"x-omniserve-mode", "x-omniserve-service-token", "x-omniserve-client"} <= removed(result, "image.overflow")
    assert appended(result, "image.overflow")["authorization"] == "Bearer 100%%"
    assert routes(result, "image.upscale") == []


def test_who_asks_for_no_tier_may_leave_the_engine_where_the_default_tier_may():
    overflow = replace(OVERFLOW, tiers=frozenset({"paid", "free"}))
    others, allowed = routes(rendered(Upstream("image", "image", (overflow,))), "image.edits")
    assert others["route"]["cluster"] == "facade"
    assert "x-omniserve-mode" not in added(others)
    pattern = others["match"]["headers"][-1]["string_match"]["safe_regex"]["regex"]
    assert [tier for tier in TIERS if re.fullmatch(pattern, tier)] == [
        tier for tier in TIERS if tier not in overflow.tiers
    ]
    assert [each["name"] for each in allowed["match"]["headers"]] == [":method"]


def test_a_gated_route_leads_to_the_gate_and_says_what_to_ask_for():
    result = rendered(Upstream("tts", "tts", (LOCAL,), permits=3))
    (route,) = routes(result, "tts.speech")
    assert route["route"]["cluster"] == "gate"
    assert added(route) == {
        "x-omniserve-route": "tts.speech",
        "x-omniserve-ask": "route=tts.speech;upstream=tts;modality=tts;units=3",
    }


def test_a_forced_tier_and_who_pays_are_part_of_what_is_asked():
    overrides = {"animation.generations": RouteOverride(paying_tiers=frozenset({"sub", "paid"}))}
    result = rendered(Upstream("animation", "animation", (LOCAL,)), overrides=overrides)
    paying, rest = routes(result, "animation.generations")
    asked = "route=animation.generations;upstream=animation;modality=animation;tier=background;paying=paid+sub"
    assert added(paying)["x-omniserve-ask"] == asked
    assert added(paying)["x-animation-publish"] == "r2-searchable"
    assert rest["direct_response"]["status"] == 402


def test_only_the_epoch_that_admission_names_leads_from_the_gate_to_the_worker():
    result = rendered(Upstream("tts", "tts", (LOCAL,)))
    host = hosts(result.routes["gate"], "gate")
    ways = {
        tuple(h["string_match"]["exact"] for h in route["match"]["headers"]): route["route"]["cluster"]
        for route in host["routes"][:-1]
    }
    assert ways["tts.speech", "e0"] == "tts.local.e0"
    assert ways["tts.speech", "e1"] == "tts.local.e1"
    assert host["routes"][-1]["direct_response"]["status"] == 591
    assert "x-omniserve-overflow" in host["response_headers_to_remove"]


def test_workers_see_nothing_that_the_mesh_says_to_itself():
    secret = {"x-omniserve-ask", "x-omniserve-route", "x-omniserve-admitted", "x-omniserve-tier", "x-omniserve-client"}
    secret |= {"x-omniserve-service-token", "x-omniserve-listener", "x-envoy-original-path"}
    result = rendered(
        Upstream("tts", "tts", (LOCAL, OVERFLOW)),
        Upstream("stt", "stt", (LOCAL,), permits=0),
        Upstream("h3", "video", (Group(GroupKind.MANAGED, (THERE,)),), permits=0),
    )
    assert secret <= set(hosts(result.routes["gate"], "gate")["request_headers_to_remove"])
    for name in ("tts.overflow", "stt.local", "h3.managed"):
        assert secret <= removed(result, name)
    assert "x-omniserve-internal" in removed(result, "tts.overflow")
    assert "x-omniserve-internal" not in removed(result, "stt.local")


@pytest.mark.parametrize("listener", ["public", "operator", "mesh"])
def test_callers_credentials_end_at_the_listener(listener):
    gone = set(rendered().routes[listener]["request_headers_to_remove"])
    assert {
        "authorization",
        "x-api-key",
        "x-rapid-api-key",
        "secret",
        "x-om-service-token",
        "x-om-client",
        "x-om-mode",
    } == gone


def test_a_group_elsewhere_gets_its_own_credential_to_the_letter():
    result = rendered(Upstream("tts", "tts", (LOCAL, OVERFLOW)))
    assert appended(result, "tts.overflow") == {"authorization": "Bearer 100%%"}
    assert appended(result, "tts.local.e0") == {}


def test_the_service_token_goes_to_services_of_the_mesh_only():
    result = rendered(Upstream("tts", "tts", (LOCAL, OVERFLOW)), authenticate_public=True)
    for route in hosts(result.routes["public"], "public")["routes"]:
        target = route.get("route", {}).get("cluster")
        assert ("x-omniserve-service-token" in added(route)) == (target in {"diffusion", "facade", "llm"})


def test_who_may_overflow_tries_and_goes_on_and_who_may_not_waits():
    paid, others = routes(rendered(Upstream("tts", "tts", (LOCAL, OVERFLOW))), "tts.speech")
    assert paid["match"]["headers"][-1]["string_match"]["safe_regex"]["regex"] == r"(?i)\s*(paid)\s*"
    groups = paid["route"]["inline_cluster_specifier_plugin"]["extension"]["typed_config"]["priority_groups"]
    assert [group["name"] for group in groups] == ["gate", "tts.overflow"]
    assert added(paid)["x-omniserve-ask"].endswith(";try")
    assert paid["request_body_buffer_limit"] == 94371840
    policy = paid["route"]["retry_policy"]
    assert policy["num_retries"] == 1
    assert "5xx" in policy["retry_on"].split(",")
    assert policy["retriable_headers"] == [{"name": "x-omniserve-overflow", "present_match": True}]
    assert others["route"]["cluster"] == "gate"
    assert "try" not in added(others)["x-omniserve-ask"]


def test_a_local_first_group_replays_its_own_codes_and_no_other_for_every_tier():
    local = Group(GroupKind.LOCAL, (HERE,), replay_statuses=frozenset({429, 502, 503, 504}))
    result = rendered(Upstream("stt", "stt", (local, Group(GroupKind.OVERFLOW, (THERE,)))))
    (route,) = routes(result, "stt.transcriptions")
    policy = route["route"]["retry_policy"]
    assert policy["retriable_status_codes"] == [429, 502, 503, 504]
    assert "5xx" not in policy["retry_on"].split(",")
    told = {each["header"]["key"] for each in route["response_headers_to_add"]}
    assert told == {"x-omniserve-asr-backend", "x-omniserve-asr-attempts"}


def test_a_managed_route_needs_no_permit_has_its_own_clock_and_refuses_other_tiers_before_anything_is_contacted():
    managed = Group(GroupKind.MANAGED, (THERE,), tiers=frozenset({"paid"}))
    paid, others = routes(
        rendered(Upstream("h3", "video", (managed,), permits=0, timeout_ms=1_800_000)), "video.generations"
    )
    assert (paid["route"]["cluster"], paid["route"]["timeout"]) == ("h3.managed", "1800s")
    assert paid["route"]["regex_rewrite"]["substitution"] == "/predict-sync"
    assert others["direct_response"]["status"] == 402
    assert "paid" in others["direct_response"]["body"]["inline_string"]


def test_a_wait_for_a_permit_does_not_count_as_an_answer_that_takes_too_long():
    result = rendered(Upstream("tts", "tts", (LOCAL,), timeout_ms=1500))
    (route,) = routes(result, "tts.speech")
    behind = hosts(result.routes["gate"], "gate")["routes"][0]
    assert (route["route"]["timeout"], behind["route"]["timeout"]) == ("0s", "1.500s")


def test_endpoints_with_numbers_go_into_files_that_both_epochs_share_and_names_are_looked_up():
    named = Group(GroupKind.LOCAL, (Endpoint("http", "worker", 80),))
    result = rendered(Upstream("tts", "tts", (LOCAL,)), Upstream("stt", "stt", (named,)))
    assert set(result.endpoints) == {"tts.local"}
    for epoch in ("e0", "e1"):
        source = cluster(result, f"tts.local.{epoch}")["eds_cluster_config"]
        assert source["service_name"] == "tts.local"
        assert source["eds_config"]["path_config_source"] == {"path": "/xds/eds.tts.local.yaml"}
    assert cluster(result, "stt.local.e1")["type"] == "STRICT_DNS"


def test_an_endpoint_that_drains_or_weighs_more_says_so():
    group = Group(
        GroupKind.LOCAL, (Endpoint("http", "127.0.0.1", 1, draining=True), Endpoint("http", "::1", 2, weight=3))
    )
    (locality,) = rendered(Upstream("tts", "tts", (group,))).endpoints["tts.local"]["endpoints"]
    first, second = locality["lb_endpoints"]
    assert (first["health_status"], first["load_balancing_weight"]) == ("DRAINING", 1)
    assert (second["endpoint"]["hostname"], second["load_balancing_weight"]) == ("[::1]:2", 3)


def test_a_path_before_the_requests_own_belongs_to_the_group():
    elsewhere = Group(GroupKind.OVERFLOW, (Endpoint("http", "10.0.0.9", 1, path_prefix="/models/a"),))
    result = rendered(Upstream("tts", "tts", (LOCAL, elsewhere)))
    scripts = {name: str(cluster(result, name)).count("[[/models/a]] .. ") for name in ("tts.local.e0", "tts.overflow")}
    assert scripts == {"tts.local.e0": 0, "tts.overflow": 1}


@pytest.mark.parametrize(
    ("hosts_", "names"),
    [
        (("api.example.com",), {"sni": "api.example.com"}),
        (("a.example.com", "b.example.com"), {"auto_host_sni": True, "auto_sni_san_validation": True}),
        (("10.0.0.1",), {}),
    ],
)
def test_tls_asks_for_the_endpoints_own_name_and_checks_it(hosts_, names):
    group = Group(GroupKind.OVERFLOW, tuple(Endpoint("https", host, 443) for host in hosts_))
    context = cluster(rendered(Upstream("tts", "tts", (LOCAL, group))), "tts.overflow")["transport_socket"][
        "typed_config"
    ]
    assert {key: context[key] for key in ("sni", "auto_host_sni", "auto_sni_san_validation") if key in context} == names
    validation = context["common_tls_context"]["validation_context"]
    assert validation["trusted_ca"] == {"filename": "/ca.crt"}
    assert names.get("auto_sni_san_validation") or validation["match_typed_subject_alt_names"]


def test_a_group_with_authorities_of_its_own_trusts_no_others():
    group = Group(GroupKind.OVERFLOW, (THERE,), ca="/own.crt")
    context = cluster(rendered(Upstream("tts", "tts", (LOCAL, group))), "tts.overflow")["transport_socket"][
        "typed_config"
    ]
    assert context["common_tls_context"]["validation_context"]["trusted_ca"] == {"filename": "/own.crt"}


def test_with_another_group_waiting_dead_endpoints_are_not_tried_all_the_same():
    result = rendered(Upstream("tts", "tts", (LOCAL, OVERFLOW), health_path="/health"))
    local = cluster(result, "tts.local.e0")
    assert local["common_lb_config"]["healthy_panic_threshold"]["value"] == 0
    assert local["health_checks"][0]["http_health_check"]["path"] == "/health"
    assert "common_lb_config" not in cluster(rendered(Upstream("tts", "tts", (LOCAL,))), "tts.local.e0")


def test_connections_can_be_used_once_only():
    result = rendered(Upstream("tts", "tts", (LOCAL,), reuse_connections=False))
    options = next(iter(cluster(result, "tts.local.e0")["typed_extension_protocol_options"].values()))
    assert options["common_http_protocol_options"]["max_requests_per_connection"] == 1


def test_calls_from_inside_are_marked_for_workers_and_no_others_are():
    result = rendered(Upstream("tts", "tts", (LOCAL,)))
    marked = {
        name: "x-omniserve-internal" in added(routes(result, "tts.speech", name)[0])
        for name in result.routes
        if name != "gate"
    }
    assert marked == {"public": False, "operator": False, "mesh": True}


def checked(result, listener, path=None):
    host = hosts(result.routes[listener], listener)
    scope = host if path is None else next(r for r in host["routes"] if r["match"] == {"path": path})
    settings = scope["typed_per_filter_config"]["envoy.filters.http.ext_authz"]
    return (
        settings.get("check_settings", {}).get("context_extensions", {}).get("listener")
        if "disabled" not in settings
        else None
    )


def test_callers_are_checked_as_soon_as_there_is_a_key_and_inside_the_mesh_always():
    assert [checked(rendered(), name) for name in ("public", "operator", "mesh")] == [None, None, "mesh"]
    closed = rendered(authenticate_public=True, authenticate_operator=True)
    assert [checked(closed, name) for name in ("public", "operator", "mesh")] == ["public", "operator", "mesh"]


def test_where_not_everybody_may_ask_for_anything_callers_are_checked_without_keys_too():
    door = DoorFacts(("localhost",), "x", 80, 600, checks_everybody=True, ca="/ca.crt")
    assert checked(rendered(door=door), "public") == "public"


@pytest.mark.parametrize("path", ["/health", "/readyz", "/v1/models", "/docs", "/openapi.json"])
def test_some_routes_need_no_key(path):
    assert checked(rendered(authenticate_public=True), "public", path) is None


def test_a_smaller_body_limit_of_an_upstream_is_refused_at_its_own_route():
    large, route = routes(rendered(Upstream("tts", "tts", (LOCAL,), max_body_mib=5)), "tts.speech")
    assert large["direct_response"]["status"] == 413
    assert large["match"]["headers"][-1]["range_match"]["start"] == 5 * 1024 * 1024 + 1
    assert route["route"]["cluster"] == "gate"


def test_the_same_settings_give_the_same_version_and_others_another():
    tts = Upstream("tts", "tts", (LOCAL,))
    assert rendered(tts).version == rendered(tts).version != rendered().version


def test_the_whole_has_neither_files_nor_references_left():
    result = rendered(Upstream("tts", "tts", (LOCAL, OVERFLOW)))
    manager = {"rds": {"route_config_name": "public"}, "stat_prefix": "public"}
    static = {
        "dynamic_resources": {"cds_config": {}},
        "static_resources": {"listeners": [{"filters": [{"typed_config": manager}]}], "clusters": [{"name": "gate"}]},
    }
    text = str(whole(static, result))
    assert "eds_cluster_config" not in text
    assert "'rds'" not in text
    assert "dynamic_resources" not in text
    assert "x-om-service-token" in text


@pytest.mark.parametrize(
    ("milliseconds", "written"), [(0, "0s"), (1000, "1s"), (1, "0.001s"), (1_800_000, "1800s"), (2050, "2.050s")]
)
def test_durations_are_written_as_envoy_reads_them(milliseconds, written):
    assert seconds(milliseconds) == written
