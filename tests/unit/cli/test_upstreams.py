"""The table of `omniserve upstreams`."""

from cli.upstreams import HEADER, rows
from omniserve.admission.v1 import admission_pb2
from omniserve.relay.v1 import relay_pb2 as pb


def endpoint(address, **more):
    return pb.Endpoint(address=address, **more)


def test_each_endpoint_has_a_line_and_the_upstreams_numbers_stand_in_the_first():
    local = pb.EndpointGroup(
        kind=pb.GROUP_KIND_LOCAL,
        endpoints=[
            endpoint("http://a:1", health=pb.ENDPOINT_HEALTH_HEALTHY, active_requests=2),
            endpoint("http://b:1", health=pb.ENDPOINT_HEALTH_DRAINING),
        ],
    )
    overflow = pb.EndpointGroup(
        kind=pb.GROUP_KIND_OVERFLOW,
        tiers=[admission_pb2.TIER_PAID],
        endpoints=[endpoint("https://c:443", path_prefix="/v1", origin=pb.ENDPOINT_ORIGIN_LIVE)],
    )
    listed = pb.ListUpstreamsResponse(upstreams=[pb.Upstream(name="tts", groups=[local, overflow])])
    status = pb.UpstreamStatus(
        name="tts",
        requests_total=10,
        reused_total=7,
        connect_failures_total=1,
        timeouts_total=1,
        responses_total={"2xx": 6, "5xx": 2},
        overflow_total={"saturated": 3, "local_failed": 0},
    )
    found = rows(listed, pb.GetStatusResponse(upstreams=[status]))
    assert found == [
        ("tts", "local", "http://a:1", "healthy", "all", "2", "10", "7", "4", "saturated=3"),
        ("", "local", "http://b:1", "draining", "all", "0", "", "", "", ""),
        ("", "overflow", "https://c:443/v1 (live)", "?", "paid", "0", "", "", "", ""),
    ]
    assert {len(row) for row in found} == {len(HEADER)}


def test_an_upstream_that_envoy_says_nothing_of_has_zeros():
    group = pb.EndpointGroup(kind=pb.GROUP_KIND_MANAGED, endpoints=[endpoint("http://h3:1")])
    listed = pb.ListUpstreamsResponse(upstreams=[pb.Upstream(name="h3", groups=[group])])
    assert rows(listed, pb.GetStatusResponse())[0][-4:] == ("0", "0", "0", "0")
