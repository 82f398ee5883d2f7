import importlib
import importlib.util
import subprocess
import sys

import pytest

from services.kit.lean import Later, inner, without

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


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that has a great whole and a small part."""
    folder = tmp_path / "great"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .small import *\nfrom .large import *\n")
    (folder / "small.py").write_text("from .least import NUMBER\n")
    (folder / "least.py").write_text("NUMBER = 7\n")
    (folder / "large.py").write_text("LARGE = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "great"]:
        del sys.modules[name]


def test_of_a_package_no_more_is_loaded_than_the_inner_module_needs(package):
    small = inner("great.small")
    assert small.NUMBER == 7
    assert {name for name in sys.modules if name.startswith("great")} == {"great.small", "great.least"}
    whole = importlib.import_module("great")
    assert (whole.LARGE, whole.NUMBER) == (True, 7)
    assert inner("great.small") is small


def test_an_inner_module_that_is_not_there_is_an_import_error_and_leaves_nothing(package):
    for name in ("great.nothing", "nothing.great"):
        with pytest.raises(ModuleNotFoundError):
            inner(name)
    assert not {"great", "nothing"} & sys.modules.keys()
    assert importlib.import_module("great").LARGE


@pytest.mark.parametrize(
    ("host", "bindings"),
    [("services.llm.host.engine_role", "llama_cpp"), ("services.diffusion.host.sd", "stable_diffusion_cpp")],
)
def test_a_host_loads_of_its_engine_s_package_the_declarations_only(host: str, bindings: str):
    program = f"import sys, {host}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert f"{bindings}.{bindings}" in loaded
    assert not {bindings, "diskcache", "multiprocessing", f"{bindings}.{bindings.removesuffix('_cpp')}"} & loaded


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
