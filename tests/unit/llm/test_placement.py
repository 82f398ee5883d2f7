import pytest

from services.llm.core.placement import ALL_LAYERS, Device, Placed, PlacementError, place

GIB = 2**30
CARD = Device("RTX", 10 * GIB, 12 * GIB)


def decide(asked: int | None, gpus: list[Device], *, size: int = 4 * GIB, fallback: bool = False) -> Placed:
    return place(
        asked=asked, gpus=gpus, model_bytes=size, layers=30, keep_free_bytes=2 * GIB, allow_cpu_fallback=fallback
    )


def test_without_a_gpu_automatic_means_the_cpu_and_that_is_not_degraded() -> None:
    assert decide(None, []) == Placed(0, "cpu")


def test_layers_that_were_asked_for_without_a_gpu_are_refused_with_the_way_out() -> None:
    with pytest.raises(PlacementError, match=r"20 layers .* OMNISERVE_LLM_ALLOW_CPU_FALLBACK=1"):
        decide(20, [])
    with pytest.raises(PlacementError, match="all layers"):
        decide(-1, [])


def test_with_the_fallback_allowed_it_runs_on_the_cpu_and_says_degraded() -> None:
    placed = decide(20, [], fallback=True)
    assert (placed.gpu_layers, placed.device, placed.degraded) == (0, "cpu", True)
    assert "20 layers" in placed.reason


def test_automatic_takes_all_layers_when_they_fit_beside_what_stays_free() -> None:
    assert decide(None, [CARD]) == Placed(ALL_LAYERS, "RTX")
    assert decide(None, [CARD], size=16 * GIB) == Placed(15, "RTX")
    assert decide(None, [Device("full", GIB, 12 * GIB)]) == Placed(0, "cpu")


def test_the_freest_card_is_taken() -> None:
    assert decide(None, [Device("small", 3 * GIB, 4 * GIB), CARD]).device == "RTX"


def test_asked_layers_are_what_is_offloaded() -> None:
    assert decide(0, [CARD]) == Placed(0, "cpu")
    assert decide(20, [CARD]) == Placed(20, "RTX")
    assert decide(99, [CARD]) == Placed(ALL_LAYERS, "RTX")
    assert decide(-1, [CARD]) == Placed(ALL_LAYERS, "RTX")
