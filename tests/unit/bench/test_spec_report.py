from pathlib import Path

from bench.spec.run import Arm, report, sources


def test_each_source_of_drafts_is_measured_by_itself() -> None:
    assert list(sources(4, None)) == ["lookup"]
    by_model = sources(4, Path("/small.gguf"))
    assert list(by_model) == ["lookup", "model", "both"]
    assert "OMNISERVE_LLM_SPEC_DRAFT_GGUF" not in by_model["lookup"]
    assert by_model["model"]["OMNISERVE_LLM_SPEC_LOOKUP"] == "0"
    assert by_model["both"]["OMNISERVE_LLM_SPEC_DRAFT_GGUF"] == "/small.gguf"


def test_a_line_tells_acceptance_and_calls() -> None:
    drafted = Arm(20.0, 128, 64, drafted=100, accepted=75, calls_saved=60, draft_calls=90)
    plain = Arm(10.0, 128, 128, drafted=0, accepted=0, calls_saved=0, draft_calls=0)
    line = report("model", "copying", [drafted], [plain])
    assert "tokens/s with over without 2.00" in line
    assert "steps 0.50" in line
    assert "drafted 100, accepted 75 (75%); calls saved 60 for 128 tokens, 90 smaller ones" in line
