"""How a mesh under measurement is set up and told apart from the inside."""

import itertools
from pathlib import Path

import pytest

from bench.llm.mesh import part_name, settings
from bench.llm.sides import Counters, Shape, peer_command

SHAPE = Shape(gguf=Path("/models/tiny.gguf"), threads=2, slots=16, context_tokens=8192)
DOORS = {"OMNISERVE_STATE_DIR": "/state", "OMNISERVE_EDGE_PORT": "1"}


def test_both_sides_get_the_same_model_threads_slots_and_context():
    ours = settings(SHAPE, DOORS, {})
    theirs = peer_command(Path("/llama-server"), SHAPE, port=9)

    asked = dict(itertools.pairwise(theirs))
    assert ours["OMNISERVE_LLM_GGUF"] == asked["--model"]
    assert ours["OMNISERVE_LLM_THREADS"] == asked["--threads"] == asked["--threads-batch"] == "2"
    assert ours["OMNISERVE_LLM_CONTEXTS"] == ours["OMNISERVE_ADMISSION_SLOTS"] == asked["--parallel"] == "16"
    assert ours["OMNISERVE_LLM_CTX"] == asked["--ctx-size"] == "8192"


def test_a_mesh_under_measurement_keeps_to_its_own_doors():
    assert settings(SHAPE, DOORS, {"OMNISERVE_EDGE_PORT": "8791"})["OMNISERVE_EDGE_PORT"] == "1"


def test_a_setting_in_the_environment_wins_so_that_a_run_can_vary_it():
    assert settings(SHAPE, DOORS, {"OMNISERVE_LLM_THREADS": "1"})["OMNISERVE_LLM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (["omniserve-llm"], "llm"),
        (["/venv/bin/python", "-m", "services.llm.host", "--fd", "3"], "llm.host"),
        (["/venv/bin/python", "-m", "facade"], "facade"),
        (["envoy", "-c", "envoy.yaml"], "envoy"),
        (["/venv/bin/python", "/venv/bin/supervisord", "-n"], "supervisor"),
        (["sleep", "1"], "other"),
        ([], "other"),
    ],
)
def test_every_process_of_the_mesh_is_known_by_its_part(command, part):
    assert part_name(command) == part


def test_counters_that_one_reading_lacks_are_not_invented():
    assert Counters(10, 5.0).since(Counters(4, 2.0)) == Counters(6, 3.0)
    assert Counters(10, None).since(Counters(4, 2.0)) == Counters(6, None)
