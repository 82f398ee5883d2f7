"""Health, readiness, status and the description of the API."""

import pytest

from facade.server import running_facade
from facade.settings import FacadeSettings
from omniserve.llm.v1 import llm_pb2


async def test_health_is_ok_while_all_services_are(mesh):
    answer = (await mesh.http.get("/health")).json()
    assert answer == {
        "status": "ok",
        "services": {name: {"status": "serving"} for name in ("admission", "diffusion", "jobs", "llm", "vram")},
    }


async def test_an_llm_without_its_engine_degrades_health_and_ends_readiness(mesh):
    mesh.llm_health.set(False)
    health, ready = await mesh.http.get("/health"), await mesh.http.get("/readyz")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert health.json()["services"]["llm"]["status"] == "not_serving"
    assert (ready.status_code, ready.json()["error"]["reason"]) == (503, "loading")
    assert "llm is not_serving" in ready.json()["error"]["message"]
    mesh.llm_health.set(True)
    assert (await mesh.http.get("/readyz")).status_code == 200


async def test_an_engine_on_the_cpu_against_the_settings_degrades_health_and_ends_readiness(mesh):
    mesh.llm.engine.placement.MergeFrom(
        llm_pb2.Placement(device="cpu", degraded=True, reason="20 layers asked for, no GPU backend")
    )
    health, ready = await mesh.http.get("/health"), await mesh.http.get("/readyz")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert "no GPU backend" in health.json()["services"]["llm"]["detail"]
    assert ready.status_code == 503
    assert "no GPU backend" in ready.json()["error"]["message"]
    mesh.llm.engine.placement.degraded = False
    assert (await mesh.http.get("/readyz")).status_code == 200


async def test_an_llm_that_serves_but_does_not_tell_its_status_is_degraded(mesh):
    mesh.llm.hang.clear()
    health = (await mesh.http.get("/health")).json()
    mesh.llm.hang.set()
    assert health["services"]["llm"]["status"] == "degraded"


async def test_a_picture_engine_that_is_stuck_degrades_health(mesh):
    mesh.diffusion.engine.stuck = True
    health = (await mesh.http.get("/health")).json()
    assert health["services"]["diffusion"] == {"status": "degraded", "detail": "painter is stuck"}
    assert (await mesh.http.get("/readyz")).status_code == 200
    status = (await mesh.http.get("/status")).json()
    assert status["services"]["diffusion"]["engines"][0]["stuck"] is True


async def test_a_stopped_llm_is_unreachable(mesh):
    await mesh.stop_llm()
    assert (await mesh.http.get("/health")).json()["services"]["llm"]["status"] == "unreachable"
    assert (await mesh.http.get("/readyz")).status_code == 503


async def test_readiness_asks_only_for_what_is_required(open_mesh):
    async with open_mesh(required_services=("admission",)) as mesh:
        await mesh.stop_llm()
        assert (await mesh.http.get("/readyz")).status_code == 200
        assert (await mesh.http.get("/health")).json()["status"] == "degraded"


async def test_status_shows_what_every_service_tells(mesh):
    answer = (await mesh.http.get("/status")).json()
    assert answer["status"] == "ok"
    assert answer["services"]["llm"]["engines"][0]["active_sequences"] == 0
    assert answer["services"]["admission"]["pools"][0]["name"] == "gpu0"
    assert not any(service["stale"] for service in answer["services"].values())


async def test_status_tells_at_the_top_where_the_default_model_runs(mesh):
    mesh.llm.engine.placement.MergeFrom(llm_pb2.Placement(device="cuda0", gpu_layers=9, kv_type="q8_0"))
    mesh.llm.engine.tune.profile = "ada"
    mesh.llm.engine.decode_tokens_total = 2**40
    answer = (await mesh.http.get("/status")).json()
    assert answer["gpu"] == {"placement": "gpu", "device": "cuda0", "kv_type": "q8_0", "degraded": False}
    assert answer["tune"]["profile"] == "ada"
    assert answer["services"]["llm"]["engines"][0]["decode_tokens_total"] == 2**40


async def test_status_shows_the_last_word_of_a_silent_service_as_stale(open_mesh):
    async with open_mesh(status_budget_s=2) as mesh:
        assert (await mesh.http.get("/status")).json()["services"]["llm"]["stale"] is False
        mesh.llm.hang.clear()
        answer = (await mesh.http.get("/status")).json()
        mesh.llm.hang.set()
    assert answer["status"] == "degraded"
    assert answer["services"]["llm"]["stale"] is True
    assert answer["services"]["llm"]["engines"][0]["slots"] == 4
    assert answer["services"]["llm"]["error"]["reason"] == "upstream_timeout"
    assert answer["services"]["admission"]["stale"] is False


async def test_status_says_so_when_a_service_never_answered(open_mesh):
    async with open_mesh(status_budget_s=0.3) as mesh:
        await mesh.stop_llm()
        answer = (await mesh.http.get("/status")).json()
    assert answer["services"]["llm"]["stale"] is True
    assert "engines" not in answer["services"]["llm"]


async def test_the_description_has_the_fields_that_requests_are_parsed_by(mesh):
    description = (await mesh.http.get("/openapi.json")).json()
    chat = description["paths"]["/v1/chat/completions"]["post"]
    fields = chat["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"messages", "temperature", "max_tokens", "stream", "tools"} <= set(fields)
    assert "functions" not in fields
    assert fields["temperature"]["maximum"] == 2
    assert set(description["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/engines/{engine}/completions",
        "/api/v1/generate",
        "/api/v1/generate-large",
        "/api/v1/autocomplete",
        "/api/v1/summarization",
        "/v1/embeddings",
        "/api/v1/feature-extraction",
        "/v1/rerank",
        "/v1/images/generations",
        "/v1/images/edits",
        "/v1/images/variations",
        "/v1/images/upscale",
        "/v1/images/backgrounds",
        "/v1/images/backgrounds/style",
        "/v1/images/files/{image_id}",
        "/v1/messages",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/health",
        "/readyz",
        "/status",
        "/metrics",
        "/v1/gpu/vram",
        "/v1/gpu/lease",
        "/v1/gpu/renew",
        "/v1/gpu/release",
        "/v1/host/memory",
        "/admin/hold",
        "/admin/release",
        "/admin/diffusion/teleport/clear",
        "/admin/llm/load",
        "/admin/llm/unload",
        "/admin/llm/swap",
    }


async def test_the_documentation_needs_nothing_from_elsewhere(mesh):
    answer = await mesh.http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "/v1/chat/completions" in answer.text
    assert "max_tokens" in answer.text
    for word in ("<script", "src=", "https:", "//cdn"):
        assert word not in answer.text


async def test_token_checks_may_not_be_off_where_others_can_call(tmp_path):
    settings = FacadeSettings(state_dir=tmp_path, listen="0.0.0.0:0", check_tokens=False)
    with pytest.raises(ValueError, match="loopback"):
        async with running_facade(settings):
            pass


async def test_token_checks_may_be_off_on_loopback(open_mesh):
    async with open_mesh(check_tokens=False) as mesh:
        mesh.http.headers.pop("x-omniserve-service-token")
        assert (await mesh.http.get("/v1/models")).status_code == 200
