"""Who may come in, asked by a real Envoy of a real admission: keys, tiers, doors, and what the services behind are told."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from string import Template

import grpc
import httpx
import pytest
import yaml

from deploy.replies import local_reply_config
from services.kit import keyring
from services.kit.keyring import Key, keyring_path
from services.kit.tokens import ensure_token

ROOT = Path(__file__).resolve().parents[2]
RPC = "/test.v1.Echo/Say"
# The filter chain of the front door before three listeners, with routes that show what the routes see.
CONFIG = Template(Path(__file__).with_name("authorize_envoy.yaml").read_text(encoding="utf-8"))
CREDENTIALS = {"authorization", "x-api-key", "x-rapid-api-key", "secret", "x-om-asked-tier", "x-om-service-token"}


class Worker(BaseHTTPRequestHandler):
    """Answers with what arrived."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        seen = {name.lower(): value for name, value in self.headers.items()}
        data = json.dumps({"path": self.path, "headers": seen}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@dataclass
class Door:
    """Envoy with admission behind it: base addresses of its listeners, and the state directory."""

    state_dir: Path
    public: str
    operator: str
    mesh: str
    admission: "subprocess.Popen[bytes]"
    restart: Callable[[], None]
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    def get(self, path: str = "/v1/x", *, base: str = "", **headers: str) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.get(f"{base or self.public}{path}", headers=names)

    def seen(self, path: str = "/v1/x", *, base: str = "", **headers: str) -> dict[str, str]:
        """Return the headers that the worker got; the request must have come through."""
        answer = self.get(path, base=base, **headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, str] = answer.json()["headers"]
        return found

    def who(self, path: str = "/v1/x", *, base: str = "", **headers: str) -> tuple[str, str]:
        """Return client and tier as the worker was told."""
        seen = self.seen(path, base=base, **headers)
        return seen["x-omniserve-client"], seen["x-omniserve-tier"]

    def make_key(self, name: str, tier: str = "sub", **more: float) -> str:
        """Add a key to the keyring and return its text."""
        text = keyring.new_text()
        key = Key(name, keyring.digest(text), tier, created=time.time(), **more)
        keyring.add(keyring_path(self.state_dir), key, now=time.time())
        return text


def is_open(url: str) -> bool:
    try:
        return httpx.get(f"{url}/open", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def process(command: list[str], environ: dict[str, str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("ab") as output:
        running = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(15)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


@contextmanager
def worker() -> Iterator[int]:
    class Server(ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Worker) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@contextmanager
def rpc_service() -> Iterator[int]:
    def say(request: bytes, context: grpc.ServicerContext) -> bytes:
        return dict(context.invocation_metadata())["x-omniserve-client"].encode()

    handlers = {"Say": grpc.unary_unary_rpc_method_handler(say)}
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.v1.Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(0).wait()


@pytest.fixture(scope="module")
def open_door(
    tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], list[int]], wait_until: Callable[..., None]
) -> "Callable[..., contextmanager[Door]]":
    """Return what starts Envoy and admission with further settings."""

    @contextmanager
    def start(*, check_timeout: str = "60s", **settings: str) -> Iterator[Door]:
        folder = tmp_path_factory.mktemp("door")
        public, operator, mesh, admission, checks = free_ports(5)
        path = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path))}
        environ = {
            **path,
            "OMNISERVE_STATE_DIR": str(folder),
            "OMNISERVE_ADMISSION_LISTEN": f"127.0.0.1:{admission}",
            "OMNISERVE_ADMISSION_CHECKS_LISTEN": f"127.0.0.1:{checks}",
            "OMNISERVE_DRAIN_GRACE_S": "1",
            **settings,
        }
        with ExitStack() as stack:
            values = {
                "PUBLIC": public,
                "OPERATOR": operator,
                "MESH": mesh,
                "CHECKS": checks,
                "CHECK_TIMEOUT": check_timeout,
                "WORKER": stack.enter_context(worker()),
                "RPC": stack.enter_context(rpc_service()),
                "LOCAL_REPLIES": json.dumps(local_reply_config()),
            }
            config = folder / "envoy.yaml"
            parsed = yaml.safe_load(CONFIG.substitute(values))
            config.write_text(json.dumps({name: part for name, part in parsed.items() if not name.startswith("x-")}))
            command = [sys.executable, "-m", "services.admission"]

            def run_admission() -> "subprocess.Popen[bytes]":
                return stack.enter_context(process(command, environ, folder / "admission.log"))

            token = ensure_token(folder, "envoy")
            envoy = [
                str(Path(sys.executable).with_name("envoy")),
                "-c",
                str(config),
                "--concurrency",
                "1",
                "-l",
                "error",
            ]
            envoy += ["--disable-hot-restart"]
            stack.enter_context(process(envoy, {**path, "OMNISERVE_EDGE_TOKEN": token}, folder / "envoy.log"))

            def restart() -> None:
                door.admission.kill()
                door.admission.wait()
                door.admission = run_admission()

            urls = [f"http://127.0.0.1:{port}" for port in (public, operator, mesh)]
            door = Door(folder, *urls, admission=run_admission(), restart=restart)
            wait_until(lambda: is_open(door.public), "Envoy is open")
            wait_until(lambda: door.get().status_code != 503 or door.admission.poll() is not None, "admission answers")
            assert door.admission.poll() is None, (folder / "admission.log").read_text()
            yield door
            door.client.close()

    return start


@pytest.fixture(scope="module")
def keyed(open_door: "Callable[..., contextmanager[Door]]", tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """A door where a key is wanted: the shared secret, keys of the configuration, and whatever tests make."""
    config = tmp_path_factory.mktemp("config") / "omniserve.yaml"
    config.write_text(f"keys:\n  - {{name: configured, sha256: {keyring.digest('from-yaml')}, tier: paid}}\n")
    settings = {"OMNISERVE_SECRET": "sesame/+%", "OMNISERVE_CONFIG": str(config), "OMNISERVE_OPERATOR_TOKEN": "owner"}
    with open_door(**settings) as door:
        yield door


# ---- keys --------------------------------------------------------------------------------------------------------


def test_a_key_opens_the_door_in_each_of_its_five_places(keyed):
    key = keyed.make_key("alice")
    for headers in ({"authorization": f"bEaReR {key}"}, {"x_api_key": key}, {"x_rapid_api_key": key}, {"secret": key}):
        assert keyed.who(**headers) == ("alice", "sub")
    assert keyed.who(f"/v1/x?secret={key}") == ("alice", "sub")
    assert keyed.who("/v1/x?secret=sesame%2F%2B%25") == ("shared", "free")
    assert keyed.who(x_api_key="from-yaml") == ("configured", "paid")


def test_no_credential_reaches_a_worker(keyed):
    key = keyed.make_key("bob")
    places = {"authorization": f"Bearer {key}", "x_api_key": key, "x_rapid_api_key": key, "secret": key}
    seen = keyed.seen("/v1/x", **places)
    assert not CREDENTIALS & set(seen)
    assert key not in json.dumps(seen)


@pytest.mark.parametrize("query", ["?b=2&a=1&b=1", "?flag&x=&y", "?q=%2F%20+%C3%A4&q", "?secrets=1&a=secret", "?"])
def test_other_queries_pass_as_they_are(keyed, query):
    answer = keyed.get(f"/v1/x{query}", x_api_key="from-yaml")
    assert answer.json()["path"] == f"/v1/x{query}"


def test_a_key_counts_as_soon_as_it_is_made_and_no_longer_when_it_is_revoked(keyed, wait_until):
    key = keyed.make_key("carol")
    assert keyed.who(x_api_key=key) == ("carol", "sub")
    keyring.revoke(keyring_path(keyed.state_dir), "carol", now=time.time())
    wait_until(lambda: keyed.get(x_api_key=key).status_code == 401, "the key is refused")
    assert "'carol' has been revoked" in keyed.get(x_api_key=key).json()["error"]["message"]


def test_a_key_that_is_over_says_so(keyed):
    key = keyed.make_key("dave", expires=time.time() - 1)
    answer = keyed.get(x_api_key=key)
    assert answer.status_code == 401
    assert "'dave' has expired" in answer.json()["error"]["message"]


def test_a_refusal_has_openais_shape_and_repeats_no_key(keyed):
    for headers in ({}, {"authorization": "Bearer hunter2"}, {"authorization": "Basic eDp5"}):
        answer = keyed.get(**headers)
        assert answer.status_code == 401
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["www-authenticate"].startswith("Bearer")
        error = answer.json()["error"]
        assert (error["type"], error["code"], error["reason"]) == ("authentication_error",) + ("unauthenticated",) * 2
        assert error["request_id"] == answer.headers["x-request-id"]
        assert "hunter2" not in answer.text


def test_a_header_that_comes_twice_lets_nobody_in(keyed):
    right = "from-yaml"
    for pair in ((right, right), (right, "wrong"), ("wrong", right), ("", right)):
        for name, prefix in (("x-api-key", ""), ("authorization", "Bearer "), ("secret", ""), ("x-rapid-api-key", "")):
            headers = [(name, f"{prefix}{value}".strip()) for value in pair]
            answer = keyed.client.get(f"{keyed.public}/v1/x", headers=headers)
            assert answer.status_code == 401, headers
    assert keyed.get(f"/v1/x?secret={right}&secret={right}").status_code == 401
    assert keyed.get(authorization="Bearer wrong", x_api_key=right).status_code == 401


def test_a_head_that_is_no_text_is_only_its_callers_trouble(keyed):
    host, port = keyed.public.removeprefix("http://").split(":")
    for head in (b"GET /v1/x HTTP/1.1\r\nx-api-key: \xff\xfe", b"GET /v1/\xff?secret=%FF%FE HTTP/1.1\r\nsecret: \xc3("):
        with socket.create_connection((host, int(port)), timeout=60) as line:
            line.sendall(head + b"\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert line.recv(12) in {b"HTTP/1.1 401", b"HTTP/1.1 400"}
    assert keyed.who(x_api_key="from-yaml")[0] == "configured"


def test_a_broken_keyring_leaves_the_known_keys_in_force(keyed):
    key = keyed.make_key("erin")
    assert keyed.who(x_api_key=key)[0] == "erin"
    path = keyring_path(keyed.state_dir)
    whole = path.read_bytes()
    path.write_text("{")
    assert keyed.get(x_api_key="nobody").status_code == 401  # looks at the files
    assert keyed.who(x_api_key=key)[0] == "erin"
    path.write_bytes(whole)
    assert "the keys cannot be read" in (keyed.state_dir / "admission.log").read_text()


# ---- tiers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "tier"), [("paid", "sub"), ("sub", "sub"), ("Free", "free"), ("background", "background"), ("", "sub")]
)
def test_the_tier_is_capped_before_a_route_is_chosen(keyed, asked, tier):
    key = keyed.make_key(f"t{time.monotonic_ns()}")
    answer = keyed.get(x_api_key=key, x_omniserve_tier=asked)
    assert answer.json()["headers"]["x-omniserve-tier"] == tier
    assert answer.headers["x-route"] == "others"
    assert keyed.get(x_api_key="from-yaml", x_omniserve_tier="paid").headers["x-route"] == "paid"


def test_what_a_client_says_in_the_meshs_name_changes_nothing(keyed):
    key = keyed.make_key("frank", tier="free")
    spoofs = {"x-omniserve-client": "operator", "x-om-asked-tier": "paid", "x-om-service-token": "x"}
    headers = [("x-api-key", key), *spoofs.items(), ("x-omniserve-tier", "free"), ("X-Omniserve-Tier", "paid")]
    seen = keyed.client.get(f"{keyed.public}/v1/x", headers=headers).json()["headers"]
    assert (seen["x-omniserve-client"], seen["x-omniserve-tier"]) == ("frank", "free")


def test_an_unknown_tier_is_a_bad_request(keyed):
    answer = keyed.get(x_api_key="from-yaml", x_omniserve_tier="gold")
    assert (answer.status_code, answer.json()["error"]["reason"]) == (400, "invalid_request")


# ---- gRPC --------------------------------------------------------------------------------------------------------


def say(door: Door, *metadata: tuple[str, str]) -> str:
    with grpc.insecure_channel(door.public.removeprefix("http://")) as channel:
        answer: bytes = channel.unary_unary(RPC)(b"", metadata=metadata, timeout=60)
    return answer.decode()


def test_a_grpc_caller_is_known_by_its_key_too(keyed):
    assert say(keyed, ("authorization", "Bearer from-yaml")) == "configured"


@pytest.mark.parametrize(
    ("metadata", "code", "says"),
    [
        ([], grpc.StatusCode.UNAUTHENTICATED, "this server wants an API key"),
        ([("x-api-key", "wrong")], grpc.StatusCode.UNAUTHENTICATED, "this API key is not known here"),
        ([("x-api-key", "from-yaml"), ("x-omniserve-tier", "gold")], grpc.StatusCode.INVALID_ARGUMENT, "tier 'gold'"),
    ],
)
def test_a_grpc_caller_is_refused_with_a_status_and_a_sentence(keyed, metadata, code, says):
    with pytest.raises(grpc.RpcError) as caught:
        say(keyed, *metadata)
    assert caught.value.code() is code
    assert caught.value.details().startswith(says)


def test_a_browser_over_grpc_web_gets_a_status_too(keyed):
    headers = {"content-type": "application/grpc-web+proto", "x-grpc-web": "1"}
    answer = keyed.client.post(f"{keyed.public}{RPC}", headers=headers, content=b"\0\0\0\0\0")
    assert answer.headers["grpc-status"] == "16"
    assert answer.headers["grpc-message"].startswith("this server wants an API key")


# ---- the other doors ---------------------------------------------------------------------------------------------


def test_the_operator_shows_a_token_where_there_is_one(keyed):
    assert keyed.who(base=keyed.operator, authorization="Bearer owner", x_omniserve_tier="paid") == ("operator", "paid")
    for headers in ({}, {"authorization": "Bearer sesame/+%"}, {"x_api_key": "owner"}):
        answer = keyed.get(base=keyed.operator, **headers)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (401, "unauthenticated")
    assert keyed.get(authorization="Bearer owner").status_code == 401


def test_the_mesh_listener_knows_services_by_their_tokens(keyed):
    token = ensure_token(keyed.state_dir, "jobs")
    seen = keyed.seen(base=keyed.mesh, x_omniserve_service_token=token, x_omniserve_tier="background")
    assert (seen["x-omniserve-client"], seen["x-omniserve-tier"]) == ("jobs", "background")
    assert token not in json.dumps(seen)


def test_the_mesh_listener_refuses_everybody_else(keyed):
    outsider = ensure_token(keyed.state_dir, "envoy-public")
    token = ensure_token(keyed.state_dir, "jobs")
    assert keyed.get(base=keyed.mesh).status_code == 401
    assert keyed.get(base=keyed.mesh, x_api_key="from-yaml").status_code == 401
    assert keyed.get(base=keyed.mesh, x_omniserve_service_token="x" * 43).status_code == 401
    assert keyed.get(base=keyed.mesh, x_om_service_token=token).status_code == 401
    assert keyed.get(base=keyed.mesh, x_omniserve_service_token=outsider).status_code == 403
    assert keyed.get(x_omniserve_service_token=token).status_code == 401


def test_nobody_but_envoy_asks_who_a_key_belongs_to(keyed):
    channel = grpc.insecure_channel(f"127.0.0.1:{_port(keyed)}")
    check = channel.unary_unary("/envoy.service.auth.v3.Authorization/Check")
    for token in ("", ensure_token(keyed.state_dir, "jobs"), ensure_token(keyed.state_dir, "envoy-public")):
        with pytest.raises(grpc.RpcError) as caught:
            check(b"", metadata=[("x-omniserve-service-token", token)], timeout=60)
        assert caught.value.code() in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
    channel.close()


def _port(door: Door) -> int:
    config = yaml.safe_load((door.state_dir / "envoy.yaml").read_text())
    [found] = [each for each in config["static_resources"]["clusters"] if each["name"] == "identity"]
    endpoint = found["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    port: int = endpoint["address"]["socket_address"]["port_value"]
    return port


# ---- nobody ------------------------------------------------------------------------------------------------------


def test_who_has_the_box_alone_needs_no_key_until_there_is_one(open_door, wait_until):
    with open_door() as door:
        assert door.who(x_omniserve_tier="paid") == ("anonymous", "paid")
        assert door.who() == ("anonymous", "free")
        assert door.get(x_api_key="wrong").status_code == 401
        assert door.who(base=door.operator) == ("operator", "free")
        key = door.make_key("alice", tier="paid")
        wait_until(lambda: door.get().status_code == 401, "a key is wanted")
        assert door.who(x_api_key=key) == ("alice", "paid")
        keyring.revoke(keyring_path(door.state_dir), "alice", now=time.time())
        wait_until(lambda: door.get(x_api_key=key).status_code == 401, "the key is refused")
        assert door.get().status_code == 401  # the last key is gone, and the door stays shut


def test_where_others_are_about_anonymous_callers_are_free_at_most(open_door):
    with open_door(OMNISERVE_ALLOW_ANONYMOUS="1", OMNISERVE_BIND="0.0.0.0") as door:
        assert door.who(x_omniserve_tier="paid") == ("anonymous", "free")
        assert door.who(x_api_key=door.make_key("alice", tier="paid")) == ("alice", "paid")
        assert door.who(x_omniserve_tier="paid") == ("anonymous", "free")
        assert door.get(x_api_key="wrong").status_code == 401


def test_a_restart_of_admission_loses_no_request(open_door):
    with open_door(OMNISERVE_SECRET="sesame") as door, futures.ThreadPoolExecutor(4) as callers:
        door.admission.kill()
        door.admission.wait()
        asked = [callers.submit(door.get, secret="sesame") for _ in range(4)]
        asked += [callers.submit(door.get, secret="wrong") for _ in range(4)]
        assert door.get("/open").status_code == 200  # what needs no key does not wait
        door.restart()
        assert [each.result().status_code for each in asked] == [200] * 4 + [401] * 4


def test_without_an_answer_nobody_comes_in(open_door):
    with open_door(OMNISERVE_SECRET="sesame", check_timeout="0.3s") as door:
        door.admission.kill()
        door.admission.wait()
        answer = door.get(secret="sesame")
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert answer.headers["retry-after"] == "1"
