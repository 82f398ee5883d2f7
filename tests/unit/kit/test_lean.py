import importlib.util
import subprocess
import sys

import pytest

from services.kit.lean import Later, without

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
    assert not {"rich", "pygments", "supervisor", "httpx"} & set(done.stdout.split())


def test_a_module_for_later_is_imported_when_something_in_it_is_asked_for():
    sys.modules.pop("this", None)
    later = Later("this")
    assert "this" not in sys.modules
    assert later.d["n"] == "a"
    assert "this" in sys.modules


def test_a_module_for_later_raises_what_its_import_raises():
    with pytest.raises(ModuleNotFoundError):
        _ = Later("this_is_no_module").name
