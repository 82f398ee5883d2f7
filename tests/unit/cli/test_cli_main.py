import subprocess
import sys
from pathlib import Path

import pytest

from cli import reference

ROOT = Path(__file__).parents[3]


def test_the_reference_page_says_what_help_says():
    assert reference.TARGET.read_text(encoding="utf-8") == reference.reference(), "run python -m cli.reference"


def test_help_does_not_wait_for_modules_it_does_not_need():
    code = "import sys, cli.main; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True, capture_output=True, text=True
    )
    assert not {"rich", "httpx", "pydantic", "grpc", "huggingface_hub", "psutil"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chatt"], "No such command 'chatt'"),
        (["chat", "--temperature", "9"], "Invalid value for '--temperature'"),
        (["chat", "--tier", "gold"], "Invalid value for '--tier'"),
        (["models", "pull"], "Missing argument"),
        (["models", "pull", "nonsense"], "neither a repository"),
        (["models", "pull", "o/n", "--sha256", "abc"], "--sha256 'abc' is not"),
    ],
)
def test_a_wrong_command_line_is_exit_status_2_and_no_traceback(arguments, says):
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
