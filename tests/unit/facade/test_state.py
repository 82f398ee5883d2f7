"""Status: contracts as JSON, what is wrong although a service serves, and what is told at the top."""

import orjson

from facade.translate.state import plain, summary, troubles
from omniserve.admission.v1 import admission_pb2
from omniserve.llm.v1 import llm_pb2

CPU = llm_pb2.Placement(device="cpu", kv_type="f16")
FALLEN_BACK = llm_pb2.Placement(device="cpu", degraded=True, reason="20 layers asked for, no GPU backend")


def status(*engines: llm_pb2.EngineStatus) -> llm_pb2.GetStatusResponse:
    return llm_pb2.GetStatusResponse(engines=engines)


def test_numbers_of_64_bits_stay_numbers_and_zeros_are_told():
    told = plain(status(llm_pb2.EngineStatus(model="tiny", decode_tokens_total=2**53)))
    assert told["engines"][0]["decode_tokens_total"] == 2**53
    assert told["engines"][0]["crashes_total"] == 0
    assert told["draining"] is False


def test_what_is_optional_is_told_only_when_it_is_there():
    told = plain(status(llm_pb2.EngineStatus(model="tiny")))["engines"][0]
    assert "host_pid" not in told
    assert "placement" not in told
    assert plain(status(llm_pb2.EngineStatus(host_pid=7)))["engines"][0]["host_pid"] == 7


def test_maps_and_enums_are_told_by_their_names():
    pool = admission_pb2.PoolStatus(name="gpu0", tiers=[admission_pb2.TierStatus(tier=admission_pb2.TIER_PAID)])
    told = plain(admission_pb2.GetStatusResponse(pools=[pool], units_by_modality={"MODALITY_LLM": 1}))
    assert told["units_by_modality"] == {"MODALITY_LLM": 1}
    assert told["pools"][0]["tiers"][0]["tier"] == "TIER_PAID"
    assert orjson.loads(orjson.dumps(told)) == told


def test_an_engine_where_the_settings_want_it_is_in_no_trouble():
    assert troubles(status(llm_pb2.EngineStatus(model="tiny", placement=CPU))) == []


def test_a_fallback_to_the_cpu_and_a_stuck_engine_are_told_with_the_model_and_why():
    found = troubles(
        status(llm_pb2.EngineStatus(model="big", placement=FALLEN_BACK), llm_pb2.EngineStatus(model="tiny", stuck=True))
    )
    assert found == [
        "big runs elsewhere than the settings ask: 20 layers asked for, no GPU backend",
        "tiny is stuck",
    ]


def test_the_default_models_engine_is_summed_up_at_the_top():
    engine = llm_pb2.EngineStatus(
        placement=llm_pb2.Placement(device="cuda0", gpu_layers=9, kv_type="q8_0"),
        tune=llm_pb2.Tune(profile="ada"),
        speculation=llm_pb2.Speculation(accepted_total=3),
    )
    told = summary({"llm": plain(status(engine, llm_pb2.EngineStatus(placement=CPU)))})
    assert told["gpu"] == {"placement": "gpu", "device": "cuda0", "kv_type": "q8_0", "degraded": False}
    assert told["tune"]["profile"] == "ada"
    assert told["speculation"]["accepted_total"] == 3


def test_nothing_is_summed_up_while_no_engine_is_known():
    assert summary({"llm": {"stale": True}}) == {}
    assert summary({}) == {}
    assert "gpu" not in summary({"llm": plain(status(llm_pb2.EngineStatus(model="tiny")))})
