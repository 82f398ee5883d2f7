"""What the peer is built from, and with which switches."""

import io
import tarfile

import pytest

from bench.llm import peer


def test_the_network_is_never_asked_for_a_web_page_or_a_tls_library():
    chosen = peer.switches({})

    assert {"-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"} <= set(chosen)


def test_the_switches_a_user_gave_the_wheel_reach_the_peer_too_and_win():
    assert peer.switches({"CMAKE_ARGS": "-DGGML_NATIVE=OFF '-DCMAKE_CXX_FLAGS=-O2 -g'"})[-2:] == [
        "-DGGML_NATIVE=OFF",
        "-DCMAKE_CXX_FLAGS=-O2 -g",
    ]


def test_only_llama_cpp_leaves_the_sdist_and_it_becomes_the_root(tmp_path):
    sdist = io.BytesIO()
    with tarfile.open(fileobj=sdist, mode="w") as archive:
        for name in (
            "pkg-1/vendor/llama.cpp/CMakeLists.txt",
            "pkg-1/vendor/llama.cpp/ggml/a.c",
            "pkg-1/setup.py",
            "pkg-1/vendor/other/b.c",
        ):
            archive.addfile(tarfile.TarInfo(name))
    sdist.seek(0)

    with tarfile.open(fileobj=sdist) as archive:
        archive.extractall(tmp_path, members=peer.vendored_members(archive), filter="data")

    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "CMakeLists.txt",
        "ggml/a.c",
    ]


def test_a_missing_build_tool_is_named_with_the_command_that_brings_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(peer.PeerError, match="pip install no-such-package"):
        peer.find_tool("no-such-tool", "no-such-package")


def test_a_server_built_with_the_same_switches_is_not_built_again(tmp_path):
    server = tmp_path / "1.0" / "build" / "bin" / "llama-server"
    server.parent.mkdir(parents=True)
    server.touch()
    (tmp_path / "1.0" / "built.json").write_text(peer.recipe("1.0", {}))

    assert peer.build("1.0", jobs=1, cache=tmp_path, environ={}) == server
