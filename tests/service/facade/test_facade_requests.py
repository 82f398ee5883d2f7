"""Requests: who may ask, what is refused how, and what reaches llm."""

import asyncio
import gzip
import http.client
import json

import pytest

from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError, Reason

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"x-omniserve-service-token": "guess"}, 401), ({"x-omniserve-service-token": ""}, 401)],
    ids=["no token", "a guessed token", "an empty token"],
)
async def test_nobody_but_the_front_door_is_served(mesh, headers, status):
    mesh.http.headers.pop("x-omniserve-service-token")
    answer = await mesh.http.get("/v1/models", headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["reason"] == "unauthenticated"
    assert answer.headers["x-request-id"] == answer.json()["error"]["request_id"]


async def test_a_service_of_the_mesh_is_not_the_front_door(mesh):
    answer = await mesh.http.get("/v1/models", headers=mesh.token("llm"))
    assert answer.status_code == 401


@pytest.mark.parametrize("path", ["/health", "/readyz"])
async def test_probes_need_no_token(mesh, path):
    mesh.http.headers.pop("x-omniserve-service-token")
    assert (await mesh.http.get(path)).status_code == 200


@pytest.mark.parametrize("caller", ["envoy-operator", "cli"])
async def test_the_operators_door_and_the_command_line_are_served(mesh, caller):
    assert (await mesh.http.get("/v1/models", headers=mesh.token(caller))).status_code == 200


async def test_what_the_front_door_says_of_the_caller_reaches_llm(mesh, chat):
    mesh.http.headers.update(
        {
            "x-omniserve-client": "alice",
            "x-omniserve-tier": "PAID",
            "x-request-id": "request-7",
            "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
        }
    )
    asking = chat()
    started = await mesh.llm.started()
    started.text("x")
    started.finish()
    answer = await asking
    said = started.start
    assert (said.client, said.tier, said.request_id) == ("alice", "paid", "request-7")
    assert said.traceparent == f"00-{'a' * 32}-{'b' * 16}-01"
    assert answer.headers["x-request-id"] == "request-7"
    assert answer.json()["id"] == "chatcmpl-request-7"
    assert ("facade", "alice", "paid") in mesh.llm.callers


async def test_a_request_id_that_is_none_is_replaced(mesh):
    answer = await mesh.http.get("/v1/models", headers={"x-request-id": "has spaces in it"})
    assert " " not in answer.headers["x-request-id"]


async def test_an_unknown_tier_is_refused(mesh):
    answer = await mesh.http.get("/v1/models", headers={"x-omniserve-tier": "gold"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-omniserve-tier"


async def test_a_path_nobody_knows_is_a_404_in_openais_shape(mesh):
    answer = await mesh.http.post("/v1/nothing", json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["reason"] == "not_found"


@pytest.mark.parametrize(
    "path", ["/v1/audio/speech", "/v1/images/background-removals", "/errors", "/admin/capacity", "/r2v"]
)
async def test_a_route_that_nothing_is_configured_for_says_so(mesh, path):
    answer = await mesh.http.post(path, json={})
    assert answer.status_code == 404
    assert f"Nothing is configured for {path}" in answer.json()["error"]["message"]


async def test_a_method_a_route_does_not_take_is_a_405_that_names_those_it_takes(mesh):
    answer = await mesh.http.get(CHAT)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"]["message"]


async def test_no_redirect_is_made_from_the_callers_host(mesh):
    answer = await mesh.http.get("/v1/models/", headers={"host": "evil.example"})
    assert answer.status_code == 404
    assert "location" not in answer.headers


@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "chunked"])
async def test_a_body_over_the_limit_is_a_413_that_names_the_limit(open_mesh, chunked):
    async with open_mesh(body_limit_mib=1) as mesh:

        def send() -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", mesh.running.port, timeout=30)
            headers = mesh.token("envoy-public") | ({} if chunked else {"content-length": str(3 << 20)})
            pieces = (b" " * (1 << 16) for _ in range(48))
            connection.request("POST", CHAT, body=pieces, headers=headers, encode_chunked=chunked)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())["error"]["message"]

        status, message = await asyncio.to_thread(send)
    assert status == 413
    assert "1 MiB" in message


async def test_a_compressed_body_is_refused_by_the_name_of_its_header(mesh):
    packed = gzip.compress(b'{"messages": [{"role": "user", "content": "x"}]}')
    answer = await mesh.http.post("/v1/chat/completions", content=packed, headers={"content-encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "content-encoding")
    assert answer.json()["error"]["reason"] == "unsupported"


async def test_a_big_body_is_read_whole(mesh, chat):
    text = "word " * 400_000
    asking = chat(messages=[{"role": "user", "content": text}])
    started = await mesh.llm.started()
    assert started.start.chat.messages[0].content[0].text == text
    started.finish()
    assert (await asking).status_code == 200


async def test_a_request_that_grows_too_large_for_llm_harms_nobody_else(mesh, monkeypatch, chat):
    monkeypatch.setattr("facade.session._LARGEST_START", 1000)
    other = chat()
    started = await mesh.llm.started()
    answer = await mesh.http.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 2000}]})
    assert answer.status_code == 413
    started.finish()
    assert (await other).status_code == 200


async def test_a_refusal_names_the_field_as_the_caller_wrote_it(mesh, chat):
    for theirs, ours in {
        "options.limits.stop[3]": "stop[3]",
        "options.sampling.top_k": "top_k",
        "options.top_logprobs": "top_logprobs",
        "prompt": "messages",
        "model": "model",
    }.items():
        asking = chat()
        started = await mesh.llm.started()
        started.refuse(DomainError(Reason.INVALID_REQUEST, f"'{theirs}' is wrong", field=theirs))
        error = (await asking).json()["error"]
        assert error["param"] == ours


async def test_an_unknown_model_is_a_404_with_openais_code(mesh, chat):
    asking = chat(model="no-such")
    started = await mesh.llm.started()
    started.refuse(DomainError(Reason.NOT_FOUND, "there is no model 'no-such'", field="model"))
    answer = await asking
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert answer.json()["error"]["param"] == "model"


async def test_a_reason_that_a_newer_llm_knows_is_a_500_with_its_sentence(mesh, chat):
    asking = chat()
    started = await mesh.llm.started()
    started.say(failed=llm_pb2.Failed(code=13, reason="meteor", message="a meteor fell"))
    answer = await asking
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "a meteor fell"


@pytest.mark.parametrize(("asked", "told"), [(None, "tiny"), ("tiny-alias", "tiny"), ("tiny", "tiny")])
async def test_an_answer_names_the_model_by_its_catalogue_name(mesh, chat, asked, told):
    asking = chat(**({"model": asked} if asked else {}))
    started = await mesh.llm.started()
    started.finish()
    assert (await asking).json()["model"] == told


async def test_models_are_listed_and_found_by_name_and_alias(mesh):
    listed = (await mesh.http.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["tiny", "painter"]
    for name in ("tiny", "tiny-alias", "org/tiny"):
        assert (await mesh.http.get(f"/v1/models/{name}")).json()["id"] == "tiny"
    painter = (await mesh.http.get("/v1/models/org/painter")).json()
    assert (painter["id"], painter["omniserve"]["capabilities"]) == ("painter", ["text_to_image", "lora"])
    missing = await mesh.http.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_text_becomes_tokens_and_tokens_become_text(mesh):
    tokens = (await mesh.http.post("/tokenize", json={"text": "hé", "with_pieces": True})).json()
    assert tokens["tokens"] == list("hé".encode())
    assert tokens["pieces"] == ["h", [0xC3], [0xA9]]
    assert (await mesh.http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()["text"] == "hé"


async def test_a_chat_becomes_the_tokens_of_its_prompt(mesh):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert (await mesh.http.post("/tokenize", json=body)).json()["prompt"] == "hi"


async def test_a_token_outside_the_vocabulary_is_refused(mesh):
    answer = await mesh.http.post("/detokenize", json={"tokens": [999]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tokens[0]"


async def test_tokenizing_with_an_unknown_model_is_a_404(mesh):
    answer = await mesh.http.post("/tokenize", json={"text": "x", "model": "other"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_without_llm_the_short_calls_are_503_and_tell_no_address(open_mesh):
    async with open_mesh(peer_wait_s=0.05) as mesh:
        await mesh.stop_llm()
        answer = await mesh.http.get("/v1/models")
    assert answer.status_code == 503
    assert "127.0.0.1" not in answer.text


async def test_without_diffusion_the_other_models_are_listed(open_mesh, free_ports):
    async with open_mesh(diffusion_address=f"127.0.0.1:{free_ports(1)[0]}") as mesh:
        listed = (await mesh.http.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["tiny"]


async def test_a_short_call_waits_for_an_llm_that_restarts(mesh):
    await mesh.stop_llm()
    asking = asyncio.ensure_future(mesh.http.get("/v1/models"))
    await asyncio.sleep(0.3)
    assert not asking.done()
    await mesh.start_llm()
    assert (await asking).status_code == 200


async def test_a_bug_is_a_500_that_tells_nothing_but_the_request_id(mesh, monkeypatch):
    async def explode(*_):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(type(mesh.running.facade.llm), "models", explode)
    answer = await mesh.http.get("/v1/models")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
