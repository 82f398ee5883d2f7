"""Clients that are too much for the usual set-up: OpenAI's SDK for Node, LangChain, and Schemathesis over our own description.

`make clients` installs them below build/clients and runs this file; without CLIENTS, which says where they are, nothing is run.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent / "clients"
CLIENTS = os.environ.get("CLIENTS")
LIMIT_S = 2_400

pytestmark = [
    pytest.mark.skipif(
        CLIENTS is None,
        reason="OpenAI's SDK for Node, LangChain and Schemathesis are missing: `make clients` gets them and runs this",
    ),
    pytest.mark.timeout(LIMIT_S + 60),
]


@pytest.fixture(scope="module")
def small_mesh(make_mesh, tmp_path_factory) -> "Iterator[object]":
    """A mesh whose answers end soon, however many tokens are asked for."""
    with make_mesh(tmp_path_factory.mktemp("clients"), OMNISERVE_LLM_REQUEST_CTX="768") as mesh:
        yield mesh


def _run(*command: object, **environment: str) -> None:
    """Run a client's own tests; show what they said if they fail."""
    ended = subprocess.run(
        [str(each) for each in command],
        cwd=CLIENTS,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-20_000:]


def test_openai_s_sdk_for_node_works_unchanged(small_mesh):
    script = shutil.copy(
        HERE / "openai.test.mjs", Path(str(CLIENTS)) / "openai.test.mjs"
    )  # it finds its SDK beside itself
    _run("node", "--test", script, BASE_URL=f"{small_mesh.public_url}/v1")


def test_langchain_works_unchanged(small_mesh):
    script = HERE / "langchain_chat.py"
    pytest_ = Path(str(CLIENTS)) / "venv" / "bin" / "pytest"
    _run(
        pytest_,
        "--noconftest",
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
        script,
        BASE_URL=f"{small_mesh.public_url}/v1",
    )


# Whatever is malformed, as it is; and a few of what is well-formed, made to reach the engines.
WAYS = {
    "malformed": (("--phases=coverage", "--mode=negative"), {}),
    "well-formed": (
        ("--phases=fuzzing", "--mode=positive", "--max-examples=12"),
        {"SCHEMATHESIS_HOOKS": "schemathesis_hooks"},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_request_that_our_description_suggests_is_a_failure_of_ours(small_mesh, way):
    options, environment = WAYS[way]
    _run(
        Path(str(CLIENTS)) / "venv" / "bin" / "schemathesis",
        "run",
        f"{small_mesh.operator_url}/openapi.json",
        *options,
        "--checks=not_a_server_error",
        "--seed=1",
        "--request-timeout=240",
        "--continue-on-failure",
        "--suppress-health-check=all",
        "--no-color",
        "--exclude-path=/admin/hold",  # it would hold up all the others
        PYTHONPATH=str(HERE),
        **environment,
    )
    small_mesh.wait_ready()
