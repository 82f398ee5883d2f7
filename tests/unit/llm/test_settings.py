import pytest

from services.kit.settings import SettingsError, load
from services.llm.build import host_environment
from services.llm.core.wire import Tuning
from services.llm.settings import DEFAULT_MODEL_SYSTEM, LlmSettings


def test_the_names_of_the_c_gateway_still_work() -> None:
    seeds = {
        "OMNISERVE_LLM_GGUF": "/m.gguf",
        "OMNISERVE_NGL": "20",
        "OMNISERVE_LLM_CONTEXTS": "4",
        "OMNISERVE_CTX": "4096",
    }
    seeds |= {
        "OMNISERVE_BATCH": "256",
        "OMNISERVE_UBATCH": "128",
        "OMNISERVE_KV_TYPE": "q8_0",
        "OMNISERVE_FLASH_ATTN": "auto",
    }
    settings = load(LlmSettings, seeds)
    assert (settings.ngl, settings.contexts, settings.ctx, settings.batch, settings.ubatch) == (20, 4, 4096, 256, 128)
    assert settings.tuning() == Tuning(256, 128, "q8_0", "auto")


def test_what_a_profile_chooses_is_left_to_it_and_its_bounds_hold_otherwise() -> None:
    assert load(LlmSettings, {"OMNISERVE_UBATCH": "auto"}).tuning() == Tuning()
    with pytest.raises(SettingsError, match="OMNISERVE_LLM_BATCH"):
        load(LlmSettings, {"OMNISERVE_LLM_BATCH": "16"})


def test_knobs_that_contradict_each_other_stop_the_start() -> None:
    with pytest.raises(SettingsError, match="OMNISERVE_LLM_BATCH is 32, less than OMNISERVE_LLM_CONTEXTS, 64"):
        load(LlmSettings, {"OMNISERVE_LLM_BATCH": "32", "OMNISERVE_LLM_CONTEXTS": "64"})
    with pytest.raises(SettingsError, match="256 sequences"):
        load(LlmSettings, {"OMNISERVE_LLM_CONTEXTS": "128", "OMNISERVE_LLM_WARM_PREFIXES": "129"})


def test_the_system_message_is_the_default_model_s_only_and_can_be_changed() -> None:
    assert load(LlmSettings, {}).system() == DEFAULT_MODEL_SYSTEM
    assert load(LlmSettings, {"OMNISERVE_LLM_GGUF": "/m.gguf"}).system() is None
    assert load(LlmSettings, {"OMNISERVE_LLM_SYSTEM_PROMPT": "none"}).system() is None
    assert load(LlmSettings, {"OMNISERVE_LLM_SYSTEM_PROMPT": "Be kind."}).system() == "Be kind."


def test_openmp_s_own_variables_win_over_our_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert host_environment(load(LlmSettings, {}))["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert "GOMP_SPINCOUNT" not in host_environment(load(LlmSettings, {}))


def test_at_least_one_thread_computes_and_a_number_is_obeyed() -> None:
    assert load(LlmSettings, {}).compute_threads() >= 1
    assert load(LlmSettings, {"OMNISERVE_LLM_THREADS": "3"}).compute_threads() == 3


def test_a_draft_model_that_may_propose_nothing_stops_the_start() -> None:
    with pytest.raises(SettingsError, match="OMNISERVE_LLM_SPEC_DRAFT is 0"):
        load(LlmSettings, {"OMNISERVE_LLM_SPEC_DRAFT_GGUF": "/draft.gguf"})
