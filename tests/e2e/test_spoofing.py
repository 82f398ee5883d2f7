"""Nothing that a caller sends makes it somebody else, brings it past the queue, or opens what is not for it."""

import hashlib
import json

import grpc
import httpx
import psutil
import pytest

from omniserve.admission.v1 import admission_pb2, admission_pb2_grpc
from omniserve.relay.v1 import relay_pb2, relay_pb2_grpc
from tests.fixtures.proxied import LIMIT_S, proxied_mesh
from tests.fixtures.raw import http1, http2, request_bytes
from tests.fixtures.workers import new_mark

pytestmark = pytest.mark.e2e

SPEECH = "/v1/audio/speech"
POOR, RICH = "om-poor-callers-key", "om-rich-callers-key"
HOLD = b'{"seconds": 60}'
OURS = {
    "x-omniserve-tier": "paid",
    "x-omniserve-client": "rich",
    "x-omniserve-listener": "operator",
    "x-omniserve-internal": "local",
    "x-omniserve-ask": "route=tts;modality=tts;units=0;tier=paid;try",
    "x-omniserve-route": "images.worker",
    "x-omniserve-admitted": "e1",
    "x-omniserve-overflow": "saturated",
    "x-omniserve-service-token": "made-up",
    "x-om-asked-tier": "paid",
    "x-om-service-token": "made-up",
    "x-envoy-upstream-rq-timeout-ms": "1",
    "x-envoy-original-path": "/admin/hold",
    "x-envoy-internal": "true",
    "x-envoy-retry-on": "5xx,retriable-status-codes",
    "x-envoy-retriable-status-codes": "200",
    "x-envoy-max-retries": "9",
    "x-envoy-upstream-alt-stat-name": "x",
    "x-envoy-decorator-operation": "x",
}
PREFIXES = ("x-omniserve-", "x-om-", "x-envoy-")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, make_mesh, free_ports, wait_until):
    folder = tmp_path_factory.mktemp("spoofing")
    keys = [{"name": "poor", "tier": "free", "text": POOR}, {"name": "rich", "tier": "paid", "text": RICH}]
    entries = "".join(
        f'  - {{name: {key["name"]}, tier: {key["tier"]}, sha256: "{hashlib.sha256(key["text"].encode()).hexdigest()}"}}\n'
        for key in keys
    )
    config = folder / "omniserve.yaml"
    config.write_text(f"keys:\n{entries}")
    upstreams = {"OMNISERVE_TTS_UPSTREAM": "tts", "OMNISERVE_TTS_OVERFLOW_UPSTREAM": "remote"}
    upstreams |= {"OMNISERVE_IMAGE_UPSTREAM": "image"}
    settings = {"OMNISERVE_SLOTS": "1", "OMNISERVE_CONFIG": str(config)}
    with proxied_mesh(folder, make_mesh, free_ports, wait_until, upstreams, **settings) as running:
        yield running


@pytest.fixture
def proxied(guarded):
    yield guarded
    for mark in guarded.workers.running():
        guarded.workers.release(mark)
    guarded.wait_idle()


@pytest.fixture
def taken(proxied):
    """The only slot is taken by the rich."""
    mark = new_mark()
    answer = proxied.start(SPEECH, "hold", mark=mark, headers={"x-api-key": RICH})
    proxied.workers.one(mark)
    yield proxied
    proxied.workers.release(mark)
    assert answer.result(LIMIT_S).status_code == 200


def logged(proxied, request_id):
    """Return the access log's line about a request."""
    log = proxied.mesh.state_dir / "logs" / "access.log"
    found = []

    def is_there():
        found[:] = [json.loads(line) for line in log.read_text().splitlines() if request_id in line]
        return found

    proxied.wait_until(is_there, f"the access log has {request_id}")
    return found[0]


def ask(proxied, headers, *, path=SPEECH, method="POST", body=b"{}", key=POOR, do="json", host="localhost"):
    """Send a request with these headers, in this order and spelling; return its mark and answer."""
    mark = new_mark()
    own = [("x-api-key", key), ("content-type", "application/json"), ("x-do", do), ("x-mark", mark)]
    request = request_bytes(f"{method} {path}", [*headers, *own], body, host)
    return mark, http1(proxied.mesh.public_target, request)


def is_clean(seen):
    return not [name for name in seen.names() if name.startswith(PREFIXES)]


# ---- headers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", [str.lower, str.upper, str.title, str.swapcase])
def test_headers_of_the_mesh_mean_nothing_from_a_caller(proxied, spelling):
    headers = [(spelling(name), value) for name, value in OURS.items()]
    mark, answer = ask(proxied, headers)
    assert (answer.status, answer.header("x-worker")) == (200, "tts")
    assert is_clean(proxied.workers.one(mark))
    line = logged(proxied, answer.header("x-request-id"))
    assert (line["client"], line["tier"], line["listener"]) == ("poor", "free", "public")


def test_repeating_a_header_does_not_help(proxied):
    headers = [(spelt, value) for name, value in OURS.items() for spelt in (name, name.upper(), name.title())]
    mark, answer = ask(proxied, headers + headers)
    assert answer.status == 200
    assert is_clean(proxied.workers.one(mark))
    line = logged(proxied, answer.header("x-request-id"))
    assert (line["client"], line["tier"]) == ("poor", "free")


@pytest.mark.parametrize(
    "name", ["x_omniserve_tier", "x_omniserve-admitted", "x-omniserve_internal", "X_OMNISERVE_ASK"]
)
def test_an_underscore_for_a_dash_is_refused(proxied, name):
    mark, answer = ask(proxied, [(name, "paid")])
    assert answer.status == 400
    assert proxied.workers.seen(mark=mark) == []


@pytest.mark.parametrize(
    "line",
    [
        b"x-omniserve-tier : paid",
        b"x-omniserve-tier\t: paid",
        b" x-omniserve-tier: paid",
        b"x-a: b\r\n x-omniserve-tier: paid",
        b"x-a: b\rx-omniserve-internal: local",
        b"x-a: b\x00x-omniserve-internal: local",
        b"x-omniserve-internal\x00: local",
        b"\xa0x-omniserve-internal: local",
        b"x-a: b\nx-omniserve-internal: local",
    ],
)
def test_a_header_that_is_none_is_refused_or_means_nothing(proxied, line):
    mark = new_mark()
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\nx-api-key: %b\r\nx-mark: %b\r\n" % (
        SPEECH.encode(),
        POOR.encode(),
        mark.encode(),
    )
    answer = http1(proxied.mesh.public_target, head + line + b"\r\ncontent-length: 2\r\n\r\n{}")
    assert answer.status in {0, 200, 400}
    assert all(is_clean(seen) for seen in proxied.workers.seen(mark=mark))
    assert answer.status == 200 or proxied.workers.seen(mark=mark) == []


def test_a_connection_header_cannot_take_ours_away(proxied):
    mark, answer = ask(
        proxied, [("connection", "x-omniserve-listener, x-omniserve-ask, x-request-id, x-omniserve-client")]
    )
    assert answer.status in {200, 400}
    if answer.status == 200:
        assert logged(proxied, answer.header("x-request-id"))["client"] == "poor"
        assert proxied.workers.one(mark).header("x-request-id")


@pytest.mark.parametrize(
    "smuggled",
    [
        "content-length: 6\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked, identity",
        "content-length: 6\r\ncontent-length: 7",
        "transfer-encoding: xchunked",
        "content-length: +6",
    ],
)
def test_a_body_of_two_lengths_is_refused(proxied, smuggled):
    mark = new_mark()
    lines = [f"POST {SPEECH} HTTP/1.1", "host: localhost", f"x-api-key: {POOR}", f"x-mark: {mark}", smuggled]
    head = "\r\n".join([*lines, "", "0", "", "X"])
    answer = http1(proxied.mesh.public_target, head.encode())
    assert answer.status in {400, 501}
    assert proxied.workers.seen(mark=mark) == []


# ---- tier, queue, remote -----------------------------------------------------------------------------------------


def test_a_key_never_gets_a_better_tier_than_its_own(taken):
    marks = {}
    for count, (name, key, tier) in enumerate((("poor", POOR, "paid"), ("rich", RICH, "free")), 1):
        marks[name] = new_mark()
        # `tts` of the poor may not overflow; `image` has no remote at all, so both wait in one line.
        taken.start("/v1/images/generations", "json", mark=marks[name], tier=tier, headers={"x-api-key": key})
        taken.wait_waiting(count)
    pool = taken.pools()["gpu0"]
    assert {tier.tier: tier.waiting for tier in pool.tiers if tier.waiting} == {admission_pb2.TIER_FREE: 2}


@pytest.mark.parametrize("admitted", ["e0", "e1", "1", "e0, e1"])
def test_nobody_admits_himself(taken, admitted):
    mark = new_mark()
    spoofed = {"x-api-key": POOR, **OURS, "x-omniserve-admitted": admitted, "x-omniserve-route": "audio.speech"}
    waiting = taken.start(SPEECH, "json", mark=mark, headers=spoofed)
    taken.wait_waiting(1)
    assert taken.workers.seen(mark=mark) == []
    (running,) = taken.workers.running()
    taken.workers.release(running)
    assert waiting.result(LIMIT_S).json()["worker"] == "tts"


def test_nobody_sends_himself_to_the_remote(taken):
    marks = []
    for count, host in enumerate(("tts.overflow", "gate", "tts.local.e0"), 1):
        marks.append(new_mark())
        spoofed = {"x-api-key": POOR, "host": host, "x-omniserve-overflow": "saturated", "x-omniserve-tier": "paid"}
        taken.start(SPEECH, "json", mark=marks[-1], headers=spoofed)
        taken.wait_waiting(count)
    assert [taken.workers.seen(mark=mark) for mark in marks] == [[], [], []]


# ---- paths -------------------------------------------------------------------------------------------------------

OPERATOR_PATHS = [
    "/admin",
    "/admin/",
    "/admin/hold",
    "/admin/hold?seconds=60",
    "/admin/envoy/stats",
    "/v1/gpu/lease",
    "/v1/gpu/vram",
    "/v1/gpu/renew",
    "/v1/gpu/release",
    "//v1/gpu/lease",
    "/v1/./gpu/lease",
    "/v1/models/../gpu/lease",
    "/v1/%67pu/lease",
    "/v1/gpu%2flease",
    "/v1/%2e%2e/v1/gpu/lease",
    "/V1/GPU/lease",
    "/v1/host/memory",
    "//admin/hold",
    "///admin//hold",
    "/./admin/hold",
    "/v1/../admin/hold",
    "/v1/./../admin/hold",
    f"{SPEECH}/../../../admin/hold",
    "/%61dmin/hold",
    "/%61%64%6d%69%6e/hold",
    "/admin%2fhold",
    "/admin%2Fhold",
    "/%2fadmin/hold",
    "/v1/%2e%2e/admin/hold",
    "/v1/%2e%2e%2fadmin/hold",
    "/v1/..%2fadmin/hold",
    "/v1/.%2e/admin/hold",
    "/v1/%252e%252e/admin/hold",
    "/admin%00/hold",
    "/admin%5chold",
    "/admin\\hold",
    "/v1\\..\\admin\\hold",
    "/admin;x=y/hold",
    "/;/admin/hold",
    "/v1/..;/admin/hold",
    "/ADMIN/hold",
    "/Admin/Hold",
    "/admin#/v1/models",
    "/v1/models#/../admin/hold",
    "/v1/models?/../admin/hold",
    "http://localhost/admin/hold",
    "http://127.0.0.1:8792/admin/hold",
    "HTTP://LOCALHOST//admin/hold",
    "http://operator/admin/hold",
    "http://localhost@operator/admin/hold",
    "admin/hold",
    "*",
]


@pytest.mark.parametrize("path", OPERATOR_PATHS)
def test_no_spelling_of_an_operator_path_works_in_public(proxied, path):
    for method in ("POST", "GET"):
        _, answer = ask(proxied, [("x-omniserve-listener", "operator")], path=path, method=method, body=HOLD, key=RICH)
        expected = {0, 400, 404, 405} | ({200} if path.startswith("/v1/models?") else set())
        assert answer.status in expected, answer.body
    assert not proxied.pools()["gpu0"].holds


@pytest.mark.parametrize(
    "name",
    [
        "x-original-url",
        "x-rewrite-url",
        "x-forwarded-path",
        "x-forwarded-uri",
        "x-http-method-override",
        "x-forwarded-prefix",
    ],
)
def test_no_header_chooses_another_path(proxied, name):
    mark, answer = ask(proxied, [(name, "/admin/hold")])
    assert answer.header("x-worker") == "tts"
    assert proxied.workers.one(mark).method == "POST"
    assert proxied.workers.one(mark).path == SPEECH


@pytest.mark.parametrize(
    "header",
    [
        ("x-forwarded-for", "127.0.0.1"),
        ("forwarded", "for=127.0.0.1"),
        ("x-real-ip", "127.0.0.1"),
        ("x-forwarded-host", "operator"),
        ("x-forwarded-proto", "https"),
    ],
)
def test_no_header_moves_a_caller_elsewhere(proxied, header):
    _, answer = ask(proxied, [header])
    line = logged(proxied, answer.header("x-request-id"))
    assert (line["client"], line["peer"], line["listener"]) == ("poor", "127.0.0.1", "public")
    assert ask(proxied, [header], path="/admin/hold", key=RICH)[1].status == 404


@pytest.mark.parametrize(
    "path",
    [
        f"/v1/images/..{SPEECH.removeprefix('/v1')}",
        f"/.{SPEECH}",
        f"/{SPEECH}",
        "http://localhost" + SPEECH,
        "http://gate" + SPEECH,
    ],
)
def test_what_the_routes_read_is_what_the_worker_gets(proxied, path):
    mark, answer = ask(proxied, [], path=path)
    if answer.status == 200:
        assert proxied.workers.one(mark).target == SPEECH
    else:
        assert answer.status in {400, 404}


@pytest.mark.parametrize(
    "host", ["", "gate", "operator", "mesh", "localhost:8792", "tts.local.e0", "a" * 300, "localhost, operator"]
)
def test_no_host_opens_another_door(proxied, host):
    mark, answer = ask(proxied, [], host=host)
    assert answer.status in {200, 400, 404}
    assert all(is_clean(seen) for seen in proxied.workers.seen(mark=mark))
    assert ask(proxied, [], host=host, path="/admin/hold", key=RICH)[1].status in {400, 404}


def test_two_hosts_are_refused_or_one_counts(proxied):
    _, answer = ask(proxied, [("host", "operator")], path="/admin/hold", key=RICH)
    assert answer.status in {400, 404}


@pytest.mark.parametrize("upgrade", ["h2c", "websocket", "TLS/1.0"])
def test_no_upgrade_makes_a_tunnel(proxied, upgrade):
    headers = [("connection", "Upgrade, HTTP2-Settings"), ("upgrade", upgrade), ("http2-settings", "AAMAAABkAAQAAP__")]
    _, answer = ask(proxied, headers)
    assert answer.status in {200, 400, 403, 404}
    assert http1(proxied.mesh.public_target, b"CONNECT gate:1 HTTP/1.1\r\nhost: gate:1\r\n\r\n").status in {
        0,
        400,
        403,
        404,
    }


# ---- HTTP/2 ------------------------------------------------------------------------------------------------------


def fields(path=SPEECH, *, method="POST", authority="localhost", key=POOR, scheme="http", more=()):
    pseudo = [(":method", method), (":scheme", scheme), (":path", path), (":authority", authority)]
    own = [("x-api-key", key), ("content-type", "application/json"), *more]
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (*pseudo, *own) if value is not None]


def test_http2_works_and_its_headers_mean_nothing_either(proxied):
    mark = new_mark()
    answer = http2(proxied.mesh.public_target, fields(more=[("x-mark", mark), *OURS.items(), *OURS.items()]), b"{}")
    assert (answer.status, json.loads(answer.body)["worker"]) == (200, "tts")
    assert is_clean(proxied.workers.one(mark))


@pytest.mark.parametrize("path", [path for path in OPERATOR_PATHS if path != "/v1/models?/../admin/hold"])
def test_no_pseudo_path_reaches_an_operator_route(proxied, path):
    answer = http2(proxied.mesh.public_target, fields(path, key=RICH), HOLD)
    assert answer.status in {0, 400, 404, 405}, answer.body


@pytest.mark.parametrize("authority", ["operator", "gate", "127.0.0.1:8792", "", "a@operator", "localhost\x00operator"])
def test_no_pseudo_authority_opens_another_door(proxied, authority):
    answer = http2(proxied.mesh.public_target, fields("/admin/hold", authority=authority, key=RICH), HOLD)
    assert answer.status in {0, 400, 404}


@pytest.mark.parametrize(
    "more",
    [
        [(":path", "/admin/hold")],
        [(":authority", "operator")],
        [(":method", "GET")],
        [(":scheme", "https")],
        [(":x-omniserve-tier", "paid")],
        [(":status", "200")],
        [("X-Omniserve-Internal", "local")],
        [("x-a", "b\r\nx-omniserve-internal: local")],
        [("x-a\r\nx-omniserve-internal", "local")],
        [("x-omniserve-internal ", "local")],
        [("transfer-encoding", "chunked")],
        [("connection", "x-omniserve-ask")],
        [("host", "operator")],
        [("x_omniserve_internal", "local")],
        [("", "local")],
    ],
)
def test_a_malformed_http2_request_is_refused_or_means_nothing(proxied, more):
    mark = new_mark()
    answer = http2(proxied.mesh.public_target, fields(more=[("x-mark", mark), *more]), b"{}")
    assert answer.status in {0, 200, 400}
    seen = proxied.workers.seen(mark=mark)
    assert all(is_clean(each) and each.target == SPEECH for each in seen)
    assert answer.status == 200 or not seen


def test_an_extended_connect_makes_no_tunnel(proxied):
    tunnel = [(b":method", b"CONNECT"), (b":protocol", b"websocket"), *fields("/v1/models")[1:]]
    assert http2(proxied.mesh.public_target, tunnel).status in {0, 400, 403, 404, 405}


# ---- who may call what -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "om-nobodys", POOR.upper(), f"{POOR}x", f"{RICH},{POOR}"])
def test_without_a_key_that_is_known_nothing_is_served(proxied, key):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    mark = new_mark()
    answer = proxied.ask(SPEECH, "json", mark=mark, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthenticated")
    assert proxied.workers.seen(mark=mark) == []


@pytest.mark.parametrize("path", ["/health", "/readyz", "/healthz", "/v1/models", "/docs", "/openapi.json"])
def test_some_routes_need_no_key(proxied, path):
    assert httpx.get(f"{proxied.mesh.public_url}{path}", timeout=LIMIT_S).status_code == 200


@pytest.mark.parametrize(
    "path", ["/status", "/metrics", "/errors", "/v1/chat/completions", "/nothing/there", "/docs/../status"]
)
def test_all_others_need_one(proxied, path):
    answer = http1(proxied.mesh.public_target, request_bytes(f"GET {path}"))
    assert answer.status == 401


def test_the_mesh_listener_wants_a_service_token(proxied):
    base = f"http://127.0.0.1:{proxied.mesh.environ['OMNISERVE_EDGE_MESH_PORT']}"
    refused = [
        {},
        {"x-api-key": RICH},
        {"x-om-service-token": proxied.mesh.token("facade")},
        {"x-omniserve-service-token": "made-up"},
        {"x-omniserve-service-token": proxied.mesh.token("envoy-public")},
        {"x-omniserve-service-token": proxied.mesh.token("cli")},
    ]
    for headers in refused:
        mark = new_mark()
        assert proxied.ask(SPEECH, "json", mark=mark, headers=headers, base=base).status_code in {401, 403}
        assert proxied.workers.seen(mark=mark) == []
    token = {"x-omniserve-service-token": proxied.mesh.token("facade")}
    answer = proxied.ask(SPEECH, "json", mark="from-inside", headers=token, base=base)
    assert answer.status_code == 200
    seen = proxied.workers.one("from-inside")
    assert [name for name in seen.names() if name.startswith(PREFIXES)] == ["x-omniserve-internal"]
    assert seen.header("x-omniserve-internal") == ["local"]


def test_the_operator_listener_calls_nobody_internal(proxied):
    answer = proxied.ask(SPEECH, "json", mark="operators", headers=OURS, base=proxied.mesh.operator_url)
    assert answer.status_code == 200
    assert is_clean(proxied.workers.one("operators"))


@pytest.mark.parametrize(
    "path",
    ["/admin/envoy/quitquitquit", "/admin/envoy/stats/../quitquitquit", "/admin/envoy/config_dump", "/admin/envoy/"],
)
def test_of_envoys_own_interface_the_operator_listener_shows_the_counters_only(proxied, path):
    base = proxied.mesh.operator_url
    shown = httpx.get(f"{base}/admin/envoy/stats?usedonly", headers={"host": "localhost"}, timeout=LIMIT_S)
    assert shown.status_code == 200
    assert "cluster." in shown.text
    for method in ("GET", "POST"):
        request = request_bytes(f"{method} {path}", [("content-type", "application/json")])
        assert http1(proxied.mesh.operator_target, request).status in {400, 403, 404, 405}
    assert proxied.mesh.is_ready()


MESH_RPCS = [
    ("admission", "/omniserve.admission.v1.AdmissionService/Acquire"),
    ("admission", "/omniserve.admission.v1.AdmissionService/Session"),
    ("admission", "/omniserve.admission.v1.AdmissionAdminService/Hold"),
    ("admission", "/envoy.service.auth.v3.Authorization/Check"),
    ("admission", "/envoy.service.ext_proc.v3.ExternalProcessor/Process"),
    ("relay", "/omniserve.relay.v1.RelayService/SetEndpoints"),
    ("relay", "/omniserve.relay.v1.RelayService/Forward"),
    ("relay", "/omniserve.relay.v1.RelayAdminService/ReloadConfig"),
]


@pytest.mark.parametrize(("service", "method"), MESH_RPCS)
def test_a_local_process_without_a_token_calls_no_rpc_of_the_mesh(proxied, service, method):
    for metadata in ((), (("x-omniserve-service-token", "made-up"),), (("x-omniserve-client", "facade"),)):
        with grpc.insecure_channel(proxied.mesh.address(service)) as channel:
            call = channel.stream_stream(method, request_serializer=bytes, response_deserializer=bytes)
            with pytest.raises(grpc.RpcError) as refused:
                list(call(iter([b""]), timeout=30, metadata=metadata))
        # Envoy's own questions are not even there for those who are not Envoy.
        hidden = {grpc.StatusCode.UNIMPLEMENTED} if method.startswith("/envoy.") else set()
        assert refused.value.code() in {grpc.StatusCode.UNAUTHENTICATED} | hidden


@pytest.mark.parametrize(("service", "method"), MESH_RPCS)
def test_no_mesh_rpc_is_reached_through_the_public_door(proxied, service, method):
    metadata = (("authorization", f"Bearer {RICH}"), ("x-omniserve-service-token", proxied.mesh.token("facade")))
    with grpc.insecure_channel(proxied.mesh.public_target) as channel:
        call = channel.stream_stream(method, request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.RpcError) as refused:
            list(call(iter([b""]), timeout=30, metadata=metadata))
    assert refused.value.code() in {
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.PERMISSION_DENIED,
    }


def test_a_token_opens_only_what_its_owner_may_call(proxied):
    with grpc.insecure_channel(proxied.mesh.address("relay")) as channel:
        token = (("x-omniserve-service-token", proxied.mesh.token("facade")),)
        request = relay_pb2.SetEndpointsRequest(upstream="tts")
        with pytest.raises(grpc.RpcError) as refused:
            relay_pb2_grpc.RelayServiceStub(channel).SetEndpoints(request, timeout=30, metadata=token)
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    with grpc.insecure_channel(proxied.mesh.address("admission")) as channel:
        token = (("x-omniserve-service-token", proxied.mesh.token("envoy-public")),)
        ask = admission_pb2.AcquireRequest(ask=admission_pb2.Ask(modality=admission_pb2.MODALITY_TTS))
        call = admission_pb2_grpc.AdmissionServiceStub(channel).Acquire(iter([ask]), timeout=30, metadata=token)
        with pytest.raises(grpc.RpcError) as refused:
            list(call)
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED


def test_the_gate_has_no_port(proxied):
    listeners = httpx.get(f"{proxied.mesh.admin_url}/listeners", timeout=LIMIT_S).text
    assert "gate" in listeners
    gate = next(line for line in listeners.splitlines() if line.startswith("gate"))
    assert "127.0.0.1" not in gate
    assert "0.0.0.0" not in gate
    open_ports = {
        each.laddr.port
        for each in psutil.Process(proxied.mesh.pid("envoy")).net_connections("tcp")
        if each.status == "LISTEN"
    }
    named = ("PORT", "OPERATOR_PORT", "MESH_PORT", "ADMIN_PORT")
    assert open_ports == {int(proxied.mesh.environ[f"OMNISERVE_EDGE_{name}"]) for name in named}
