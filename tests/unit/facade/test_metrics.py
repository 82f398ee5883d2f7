"""Figures as Prometheus reads them."""

from facade.translate.metrics import exposition

VRAM = {
    "vram_available": True,
    "omniserve_vram_free_gib": 1.5,
    "omniserve_vram_headroom_mb": 512,
    "omniserve_vram_leases": 2,
    "omniserve_vram_leased_mb": 700,
    "omniserve_vram_denials_total": 3,
    "omniserve_vram_lease_expiries_total": 1,
    "omniserve_vram_evictions_total": {"evicted": 4, "idle": 2},
    "stale": False,
}


def values(services) -> dict[str, str]:
    lines = exposition(services).splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_every_figure_of_memory_has_its_name_its_type_and_a_sentence() -> None:
    text = exposition({"vram": VRAM})
    assert values({"vram": VRAM}) == {
        'omniserve_service_stale{service="vram"}': "0",
        "omniserve_vram_available": "1",
        "omniserve_vram_free_gib": "1.5",
        "omniserve_vram_headroom_mb": "512",
        "omniserve_vram_leases": "2",
        "omniserve_vram_leased_mb": "700",
        "omniserve_vram_denials_total": "3",
        "omniserve_vram_lease_expiries_total": "1",
        'omniserve_vram_evictions_total{reason="evicted"}': "4",
        'omniserve_vram_evictions_total{reason="idle"}': "2",
    }
    assert "# TYPE omniserve_vram_denials_total counter\n" in text
    assert "# TYPE omniserve_vram_free_gib gauge\n" in text
    assert text.count("# HELP") == text.count("# TYPE") == 9
    assert text.endswith("\n")


def test_unknown_memory_is_minus_one_and_no_headroom() -> None:
    unknown = VRAM | {"vram_available": False, "omniserve_vram_free_gib": -1}
    del unknown["omniserve_vram_headroom_mb"]
    told = values({"vram": unknown})
    assert (told["omniserve_vram_free_gib"], told["omniserve_vram_available"]) == ("-1", "0")
    assert "omniserve_vram_headroom_mb" not in told


def test_a_service_that_does_not_answer_is_marked() -> None:
    assert values({"llm": {"stale": True}, "vram": {"stale": True}}) == {
        'omniserve_service_stale{service="llm"}': "1",
        'omniserve_service_stale{service="vram"}': "1",
    }


def test_pictures_are_counted_by_model_and_exact_caches_by_layer() -> None:
    engine = {
        "model": "painter",
        "images_total": 3,
        "steps_total": 60,
        "steps_replayed_total": 19,
        "cancelled_total": 1,
        "crashes_total": 0,
    }
    layer = {"layer": "TELEPORT_LAYER_RESULT", "hits_total": 2, "misses_total": 5, "entries": 4}
    told = values({"diffusion": {"engines": [engine], "teleport": {"layers": [layer]}, "stale": False}})
    assert told == {
        'omniserve_service_stale{service="diffusion"}': "0",
        'omniserve_images_total{model="painter"}': "3",
        'omniserve_image_steps_total{model="painter"}': "60",
        'omniserve_image_steps_replayed_total{model="painter"}': "19",
        'omniserve_image_cancelled_total{model="painter"}': "1",
        'omniserve_image_crashes_total{model="painter"}': "0",
        'omniserve_teleport_hits_total{layer="result"}': "2",
        'omniserve_teleport_misses_total{layer="result"}': "5",
        'omniserve_teleport_entries{layer="result"}': "4",
    }


def test_a_model_that_is_elsewhere_than_asked_for_is_one_figure() -> None:
    placed, fallen_back = {"placement": {"degraded": False}}, {"placement": {"degraded": True}}
    assert "omniserve_gpu_degraded 0" in exposition({"llm": {"engines": [placed, {}]}})
    assert "omniserve_gpu_degraded 1" in exposition({"llm": {"engines": [placed, fallen_back]}})
    assert "gpu_degraded" not in exposition({"llm": {"engines": []}})
