import importlib.util
import subprocess
import sys

import pytest

from services.kit.lean import without

SERVICES = (
    "services.diffusion",
    "services.admission",
    "services.jobs",
    "services.llm",
    "services.relay",
    "services.vram",
    "facade",
)


def test_a_hidden_package_is_not_found_inside_and_found_again_after():
    sys.modules.pop("this", None)
    with without("this"), pytest.raises(ModuleNotFoundError):
        importlib.import_module("this")
    assert "this" not in sys.modules
    assert importlib.util.find_spec("this")


def test_what_is_loaded_already_stays():
    with without("pytest"):
        assert importlib.import_module("pytest") is pytest
    assert sys.modules["pytest"] is pytest


def test_an_import_that_fails_inside_hides_nothing_for_longer():
    with pytest.raises(RuntimeError), without("this"):
        raise RuntimeError
    assert "this" not in sys.modules


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_loads_nothing_that_is_for_consoles(service: str):
    program = f"import sys, {service}.__main__; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert not {"rich", "pygments", "supervisor"} & set(done.stdout.split())
