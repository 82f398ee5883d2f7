import pytest

from services.llm.core.placement import (
    ALL_LAYERS,
    NO_DRIVER,
    Device,
    DriverSight,
    Placed,
    PlacementError,
    checked,
    place,
)

GIB = 2**30
CARD = Device("RTX", 10 * GIB, 12 * GIB)


def decide(
    asked: int | None,
    gpus: list[Device],
    *,
    size: int = 4 * GIB,
    fallback: bool = False,
    driver: DriverSight = NO_DRIVER,
) -> Placed:
    return place(
        asked=asked,
        gpus=gpus,
        driver=driver,
        model_bytes=size,
        layers=30,
        keep_free_bytes=2 * GIB,
        allow_cpu_fallback=fallback,
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


def test_a_gpu_that_llama_cpp_cannot_use_makes_automatic_degraded() -> None:
    placed = decide(None, [], driver=DriverSight(("NVIDIA L4",)))
    assert (placed.gpu_layers, placed.device, placed.degraded) == (0, "cpu", True)
    assert placed.reason == "the driver shows NVIDIA L4, and llama.cpp has no GPU backend here"
    assert decide(0, [], driver=DriverSight(("NVIDIA L4",))) == Placed(0, "cpu"), "the CPU is what was asked for"


def test_a_driver_that_does_not_tell_is_not_taken_for_none() -> None:
    placed = decide(None, [], driver=DriverSight(trouble="NVIDIA's driver says Unknown Error"))
    assert placed.degraded
    assert "Unknown Error" in placed.reason


def test_a_refusal_names_the_gpu_that_is_there() -> None:
    with pytest.raises(PlacementError, match=r"all layers .* the driver shows NVIDIA L4, and llama.cpp has no GPU"):
        decide(-1, [], driver=DriverSight(("NVIDIA L4",)))


@pytest.mark.parametrize(
    ("meant", "there", "layers", "device"),
    [(ALL_LAYERS, 0, 0, "cpu"), (ALL_LAYERS, 12, 12, "RTX"), (20, 12, 12, "RTX")],
)
def test_fewer_layers_on_the_device_than_meant_are_degraded(meant: int, there: int, layers: int, device: str) -> None:
    log = ["load_tensors: loading model tensors\n", f"load_tensors: offloaded {there}/31 layers to GPU\n"]
    placed = checked(Placed(meant, "RTX"), log)
    assert (placed.gpu_layers, placed.device, placed.degraded) == (layers, device, True)
    assert f"put {there} there" in placed.reason


def test_layers_where_they_were_meant_to_be_are_not_degraded() -> None:
    log = ["load_tensors: offloaded 31/31 layers to GPU\n"]
    for placed in (Placed(ALL_LAYERS, "RTX"), Placed(20, "RTX"), Placed(0, "cpu")):
        assert checked(placed, log) == placed
    assert checked(Placed(ALL_LAYERS, "RTX"), ["nothing about layers"]) == Placed(ALL_LAYERS, "RTX")
