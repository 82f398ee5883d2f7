"""Every command of the README is run: here against a running mesh, or by the check that the table names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (match["language"], match["code"])
    for match in FENCE.finditer((ROOT / "README.md").read_text())
    if match["language"] != "text"
]

ELSEWHERE = {
    "make run\n": "the `mesh` fixture starts the same launcher (test_make_run_starts_the_launcher_of_the_fixture)",
    "docker compose up\n": "make compose-test",
    "OMNISERVE_TTS_UPSTREAM=http://127.0.0.1:9083 make run\n": "tests/e2e/test_proxied_bytes.py, with workers of its own",
    "OMNISERVE_SD_MODEL=models/your-model.safetensors make run\n": "tests/e2e/test_images_sdk.py, with a small model",
    'omniserve image "a fox in the snow" -o fox.webp\n': "tests/e2e/test_images_sdk.py, with a small model",
    "omniserve keys create alice --tier sub\nomniserve keys list\nomniserve keys revoke alice\n": (
        "tests/e2e/test_keys.py: a key here would lock out the tests that share this mesh"
    ),
    "make check\nmake test\n": "this very run (.ci/run)",
}
"""Blocks that cannot run inside a test, and what runs them."""


def here(mesh, code: str) -> str:
    return code.replace("127.0.0.1:8791", mesh.public_target).replace("127.0.0.1:8792", mesh.operator_target)


def environment(mesh) -> dict[str, str]:
    scripts = str(Path(sys.executable).parent)
    address = {"OMNISERVE_CLI_URL": mesh.public_url, "OMNISERVE_CLI_OPERATOR_URL": mesh.operator_url}
    path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **mesh.environ, **address, "PATH": path, "NO_COLOR": "1"}


def run(mesh, command: list[str]) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=environment(mesh), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def lines() -> list[str]:
    """Return every shell command, continuation lines joined."""
    code = "".join(code for language, code in BLOCKS if language == "sh" and code not in ELSEWHERE)
    return [line for line in code.replace("\\\n", " ").splitlines() if line.strip()]


def test_every_block_is_run_by_something():
    assert {language for language, _ in BLOCKS} == {"sh", "python"}
    missing = [code for code in ELSEWHERE if ("sh", code) not in BLOCKS]
    assert not missing, "the table names blocks that the README no longer has"


def test_make_run_starts_the_launcher_of_the_fixture(mesh):
    planned = subprocess.run(
        ["make", "--dry-run", "run"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert " ".join(mesh.launcher.args[1:]) in planned.stdout


@pytest.mark.parametrize("command", lines())
def test_a_shell_command_of_the_readme_works(mesh, command):
    output = run(mesh, ["bash", "-c", here(mesh, command)])
    assert output.strip()
    if "capital of France" in command:
        assert "Paris" in output


@pytest.mark.parametrize("code", [code for language, code in BLOCKS if language == "python"])
def test_a_python_example_of_the_readme_answers(mesh, code):
    expected = "Paris" if "capital of France" in code else "2 vectors of 384"
    assert expected in run(mesh, [sys.executable, "-c", here(mesh, code)])
