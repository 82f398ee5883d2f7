from pathlib import Path

import pytest

from cli.doctor import host, mesh, network, toolchain
from cli.doctor.host import Gpu, GpuSeen
from cli.doctor.mesh import PathSeen, PortSeen
from cli.doctor.report import Level, exit_code, fail, ok, summary, warn
from cli.doctor.toolchain import EngineSeen
from cli.errors import Exit
from cli.models.gguf import GgufHeader

GIB = 1 << 30
HEADER = GgufHeader("llama", "Tiny", "Q4_K_M", 2048, 1, 100 << 20)


def levels(findings) -> list[Level]:
    return [finding.level for finding in findings]


@pytest.mark.parametrize(
    ("version", "in_venv", "level"),
    [
        ((3, 11, 0), True, Level.OK),
        ((3, 14, 1), True, Level.OK),
        ((3, 10, 9), True, Level.FAIL),
        ((3, 12, 0), False, Level.WARN),
    ],
)
def test_python(version, in_venv, level):
    assert toolchain.check_python(version, in_venv=in_venv).level is level


@pytest.mark.parametrize(
    ("found", "needed", "level"), [("g++ 12", True, Level.OK), (None, True, Level.FAIL), (None, False, Level.WARN)]
)
def test_a_missing_compiler_fails_only_while_the_engine_is_not_built(found, needed, level):
    finding = toolchain.check_tool("compiler", found, install="apt-get install g++", needed=needed, purpose="")
    assert finding.level is level
    assert (finding.mend == "apt-get install g++") == (found is None)


@pytest.mark.parametrize("found", ["cmake version 3.30", None])
def test_cmake_may_be_missing(found):
    assert toolchain.check_cmake(found).level is Level.OK


def test_missing_packages_are_named():
    finding = toolchain.check_packages(["grpcio", "rich"], [])
    assert finding.level is Level.FAIL
    assert "grpcio, rich" in finding.seen


def test_the_package_that_breaks_tracing_is_found_under_any_spelling():
    forbidden = toolchain.forbidden_among(["rich", "XDS_Protos"])
    finding = toolchain.check_packages([], forbidden)
    assert finding.level is Level.FAIL
    assert "uninstall -y XDS_Protos" in finding.mend
    assert toolchain.check_packages([], toolchain.forbidden_among(["rich"])).level is Level.OK


def test_stubs_that_cannot_be_imported_name_the_target_that_makes_them():
    assert toolchain.check_stubs(None).level is Level.OK
    assert toolchain.check_stubs("No module named 'omniserve'").mend == "`make protos`"


@pytest.mark.parametrize(
    ("seen", "level", "says"),
    [
        (EngineSeen(0, "0.3.36"), Level.OK, "without a GPU backend"),
        (EngineSeen(0, "0.3.36", gpu_offload=True), Level.OK, "with a GPU backend"),
        (EngineSeen(-4), Level.FAIL, "another processor"),
        (EngineSeen(-11), Level.FAIL, "signal 11"),
        (EngineSeen(1, error="ModuleNotFoundError: No module named 'llama_cpp'"), Level.FAIL, "No module named"),
    ],
)
def test_engine(seen, level, says):
    finding = toolchain.check_engine(seen)
    assert finding.level is level
    assert says in finding.seen


@pytest.mark.parametrize(
    ("version", "level"), [("1.40.0", Level.OK), ("1.40.9", Level.OK), ("1.31.2", Level.WARN), (None, Level.FAIL)]
)
def test_envoy(version, level):
    assert toolchain.check_envoy("/bin/envoy", version).level is level


@pytest.mark.parametrize(
    ("total", "available", "model", "running", "level"),
    [
        (16 * GIB, 8 * GIB, GIB, False, Level.OK),
        (16 * GIB, 2 * GIB, 4 * GIB, False, Level.WARN),
        (16 * GIB, 2 * GIB, 4 * GIB, True, Level.OK),
        (4 * GIB, 3 * GIB, 8 * GIB, False, Level.FAIL),
    ],
)
def test_memory_is_judged_against_the_model(total, available, model, running, level):
    assert host.check_memory(total, available, model, running=running).level is level


@pytest.mark.parametrize(("free", "level"), [(10 * GIB, Level.OK), (GIB, Level.WARN), (100 << 20, Level.FAIL)])
def test_disk(free, level):
    assert host.check_disk("disk", "/x", free).level is level


DEVICE = Gpu("RTX 5090", 32 * GIB, 30 * GIB)


@pytest.mark.parametrize(
    ("seen", "engine_can", "layers", "level", "says"),
    [
        (GpuSeen(error="NVML Shared Library Not Found"), False, 0, Level.OK, "none"),
        (GpuSeen(error="NVML Shared Library Not Found"), False, 20, Level.FAIL, "NGL=20"),
        (GpuSeen(error="NVML Shared Library Not Found"), False, -1, Level.FAIL, "NGL=-1"),
        (GpuSeen(error="NVML Shared Library Not Found"), False, "auto", Level.OK, "none"),
        (GpuSeen(error="Driver/library version mismatch", hardware=True), True, 0, Level.WARN, "version mismatch"),
        (
            GpuSeen((DEVICE,), "580.1", hardware=True),
            True,
            0,
            Level.OK,
            "RTX 5090 (30.0 GiB free of 32.0 GiB), driver 580.1",
        ),
        (GpuSeen((DEVICE,), "580.1", hardware=True), False, 0, Level.WARN, "no GPU backend"),
    ],
)
def test_gpu(seen, engine_can, layers, level, says):
    finding = host.check_gpu(seen, engine_can=engine_can, layers_asked=layers, may_fall_back=False)
    assert finding.level is level
    assert says in finding.seen


def test_layers_without_a_gpu_are_fine_when_the_cpu_may_stand_in():
    seen = GpuSeen(error="NVML Shared Library Not Found")
    assert host.check_gpu(seen, engine_can=False, layers_asked=20, may_fall_back=True).level is Level.OK


def test_every_settings_problem_is_a_finding_of_its_own():
    assert levels(mesh.check_environment(2, ["one", "two"])) == [Level.FAIL, Level.FAIL]
    assert levels(mesh.check_environment(2, [])) == [Level.OK]


def test_model():
    assert mesh.check_model("m.gguf", HEADER, "").seen == "Tiny Q4_K_M, 100.0 MiB (m.gguf)"
    assert mesh.check_model("m.gguf", None, "cut short").level is Level.FAIL


@pytest.mark.parametrize(
    ("seen", "can_make", "level"),
    [
        (None, True, Level.OK),
        (None, False, Level.FAIL),
        (PathSeen("run", 0o755, mine=True), True, Level.OK),
        (PathSeen("run", 0o755, mine=False, writable=False), True, Level.FAIL),
        (PathSeen("run", 0o777, mine=True), True, Level.FAIL),
    ],
)
def test_state_directory(seen, can_make, level):
    assert mesh.check_state_dir(seen, "run", can_make=can_make).level is level


FOLDER = PathSeen("run/tokens", 0o700, mine=True)


@pytest.mark.parametrize(
    ("folder", "token", "level", "says"),
    [
        (FOLDER, PathSeen("run/tokens/llm", 0o600, mine=True), Level.OK, "1 services"),
        (FOLDER, PathSeen("run/tokens/llm", 0o640, mine=True), Level.FAIL, "others can read run/tokens/llm (mode 640)"),
        (FOLDER, PathSeen("run/tokens/llm", 0o600, mine=False), Level.FAIL, "another user"),
        (FOLDER, PathSeen("run/tokens/llm", 0o600, mine=True, valid=False), Level.FAIL, "holds no token"),
        (
            PathSeen("run/tokens", 0o755, mine=True),
            PathSeen("run/tokens/llm", 0o600, mine=True),
            Level.FAIL,
            "look into run/tokens",
        ),
    ],
)
def test_tokens(folder, token, level, says):
    (finding,) = mesh.check_tokens(folder, [token])
    assert finding.level is level
    assert says in finding.seen


def test_no_tokens_yet_is_fine():
    assert levels(mesh.check_tokens(None, [])) == [Level.OK]


def test_ports_that_are_free_or_ours_make_one_line():
    ports = [PortSeen("envoy", 8791, "A"), PortSeen("llm", 9103, "B", holder="python (pid 1)", ours=True)]
    (finding,) = mesh.check_ports(ports)
    assert finding == ok("ports", "free: 8791; in use by this mesh: 9103")


def test_a_port_that_somebody_else_has_names_them_and_the_setting():
    (finding,) = mesh.check_ports([PortSeen("envoy", 8791, "OMNISERVE_EDGE_PORT", holder="nginx (pid 7)")])
    assert finding.level is Level.FAIL
    assert "nginx (pid 7)" in finding.seen
    assert "OMNISERVE_EDGE_PORT" in finding.mend


def test_a_port_asked_for_twice_or_not_allowed_fails():
    findings = mesh.check_ports([PortSeen("a", 80, "A", refused="EACCES"), PortSeen("b", 80, "B")])
    assert levels(findings) == [Level.FAIL, Level.FAIL]
    assert "A and B" in findings[1].seen


def test_collector():
    assert mesh.check_collector("", None).level is Level.OK
    assert mesh.check_collector("http://x:4317", None).level is Level.OK
    assert mesh.check_collector("http://x:4317", "refused").level is Level.WARN


def test_only_a_failure_makes_the_exit_code_one():
    fine = [ok("a", "x"), warn("b", "y", "z")]
    assert exit_code(fine) is Exit.OK
    assert exit_code([*fine, fail("c", "y", "z")]) is Exit.FAILED
    assert summary([*fine, fail("c", "y", "z")]) == "1 fail, 1 warn, 1 ok"
    assert summary(fine[:1]) == "all 1 checks are ok"


ROOT = Path("/srv/omniserve")


@pytest.mark.parametrize(
    ("name", "arguments", "folder", "ours"),
    [
        ("python3", ["python", "-m", "services.llm"], ROOT, True),
        ("python3", ["python", "-m", "facade"], ROOT, True),
        ("omniserve-llm", ["omniserve-llm"], ROOT, True),
        ("omniserve-llm", ["omniserve-llm"], Path("/srv/other"), False),
        ("envoy", ["envoy", "-c", "x"], ROOT, True),
        ("docker-proxy", ["docker-proxy"], Path("/"), True),
        ("python3", ["python", "-m", "http.server"], ROOT, False),
        ("python3", ["python", "-m", "services.llm"], Path("/srv/other"), False),
        ("envoy", ["envoy"], Path("/etc"), False),
    ],
)
def test_only_processes_of_this_checkout_belong_to_this_mesh(name, arguments, folder, ours):
    assert network.belongs_to_mesh(name, arguments, folder, ROOT) is ours
