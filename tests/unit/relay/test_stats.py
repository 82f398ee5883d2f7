"""Envoy's counters: what its admin interface says, as values."""

import re

import pytest

from services.relay.core.addresses import parse_address
from services.relay.core.stats import FILTER, ClusterName, EndpointCounts, StatsError, UpstreamCounts, parse
from services.relay.translate import place_of, upstream_status


def told(**values):
    return {"stats": [{"name": name, "value": value} for name, value in values.items()]}


def cluster(name, **metrics):
    return {f"cluster.{name}.{metric.replace('__', '.')}": value for metric, value in metrics.items()}


GATED = {
    **cluster("stt.local.e0", upstream_rq_total=10, upstream_rq_active=2, upstream_rq_pending_active=1),
    **cluster("stt.local.e0", upstream_cx_total=4, upstream_cx_connect_fail=1, upstream_rq_2xx=7, upstream_rq_5xx=3),
    **cluster("stt.local.e0", membership_healthy=1, membership_total=2, outlier_detection__ejections_enforced_total=5),
    **cluster("stt.local.e1", upstream_rq_total=1, upstream_rq_active=1, membership_healthy=2, membership_total=2),
    **cluster("stt.overflow", upstream_rq_total=4, upstream_cx_total=1, membership_healthy=1, membership_total=1),
    **cluster("stt.overflow", upstream_rq_timeout=1, upstream_rq_per_try_timeout=1, upstream_rq_4xx=1),
}


def test_an_upstream_is_the_sum_of_its_clusters():
    counts = parse(told(**GATED)).upstreams["stt"]
    assert (counts.requests, counts.active, counts.connections) == (15, 3, 5)
    assert (counts.connect_failures, counts.timeouts, counts.ejections) == (1, 2, 5)
    assert counts.responses == {"2xx": 7, "4xx": 1, "5xx": 3}


def test_requests_beyond_the_connections_made_have_reused_one():
    assert parse(told(**GATED)).upstreams["stt"].reused == 15 - (5 - 1)
    assert parse(told(**cluster("tts.local", upstream_rq_total=1, upstream_cx_total=3))).upstreams["tts"].reused == 0


def test_both_epochs_lead_to_the_same_endpoints_which_count_once():
    counts = parse(told(**GATED)).upstreams["stt"]
    assert counts.members == {"local": (1, 2), "overflow": (1, 1)}
    assert (counts.healthy, counts.endpoints) == (2, 3)


def test_what_runs_behind_the_gate_is_told_by_epoch():
    assert parse(told(**GATED)).upstreams["stt"].gates == {
        ClusterName("stt", "local", "e0"): (2, 1),
        ClusterName("stt", "local", "e1"): (1, 0),
    }
    assert parse(told(**cluster("h3.managed", upstream_rq_total=1))).upstreams["h3"].gates == {}


def test_requests_sent_again_are_counted_where_they_arrive():
    stats = {**cluster("tts.local.e0", upstream_rq_retry=1), **cluster("tts.overflow", upstream_rq_retry=3)}
    assert parse(told(**stats)).upstreams["tts"].retries == 4


def test_endpoints_are_told_apart_and_are_healthy_when_every_cluster_says_so():
    stats = {
        **cluster("stt.local.e0", **{"endpoint__127.0.0.1_9001__rq_active": 2, "endpoint__127.0.0.1_9001__healthy": 1}),
        **cluster("stt.local.e1", **{"endpoint__127.0.0.1_9001__rq_active": 1, "endpoint__127.0.0.1_9001__healthy": 0}),
        "cluster.stt.local.e0.endpoint.[__1]_9002.healthy": 1,
    }
    places = parse(told(**stats)).upstreams["stt"].places
    assert places["local", "127.0.0.1_9001"] == EndpointCounts(3, healthy=False)
    assert places["local", place_of(parse_address("http://[::1]:9002"))] == EndpointCounts(0, healthy=True)
    assert place_of(parse_address("http://worker:9002")) == ""


def test_saturated_requests_are_counted_by_route():
    stats = told(
        **{"gate.overflow.route.stt.transcriptions.cause.saturated": 3, "gate.overflow.route.stt.file.cause.": 9}
    )
    assert parse(stats).saturated == {"stt.transcriptions": 3}


def test_who_went_elsewhere_without_being_saturated_left_a_worker_that_failed():
    counts = parse(told(**GATED)).upstreams["stt"]
    assert upstream_status("stt", counts, 3).overflow_total == {"saturated": 3, "local_failed": 1}
    assert upstream_status("stt", counts, 9).overflow_total == {"saturated": 9, "local_failed": 0}
    assert upstream_status("stt", UpstreamCounts(), 0).overflow_total == {}


@pytest.mark.parametrize(
    ("values", "draining"),
    [
        ({"server.state": 0, "server.live": 1}, False),
        ({"server.state": 1}, True),
        ({"server.live": 0}, True),
        ({"listener_manager.total_listeners_draining": 2, "server.live": 1}, True),
        ({}, False),
    ],
)
def test_draining_is_what_the_server_or_its_listeners_do(values, draining):
    assert parse(told(**values)).draining is draining


def test_requests_under_way_are_those_of_the_listeners():
    values = {f"http.{name}.downstream_rq_active": 2 for name in ("public", "operator", "mesh", "gate")}
    assert parse(told(**values)).active == 6


def test_other_stats_histograms_and_texts_are_passed_by():
    found = told(**cluster("facade", upstream_rq_total=3), **{"cluster.stt.local.e0.version_text": "x"})
    found["stats"].append({"histograms": {}})
    assert parse(found).upstreams == {}


@pytest.mark.parametrize("found", [None, [], {}, {"stats": 1}, {"stats": [1]}, {"stats": [{"value": 1}]}])
def test_what_is_no_stats_is_refused(found):
    with pytest.raises(StatsError):
        parse(found)


def test_the_filter_asks_for_exactly_what_is_read():
    wanted = re.compile(FILTER)
    for name in (*GATED, "server.live", "gate.overflow.route.a.cause.saturated", "http.mesh.downstream_rq_active"):
        assert wanted.search(name), name
    assert wanted.search("cluster.stt.local.e0.endpoint.127.0.0.1_9001.rq_active")
    for name in (
        "cluster.facade.upstream_rq_total",
        "http.gate.downstream_rq_active",
        "cluster.stt.local.e0.lb_healthy",
    ):
        assert not wanted.search(name), name
