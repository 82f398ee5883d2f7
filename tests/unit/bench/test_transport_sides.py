"""How the sides of bench.transport are set up: one request for all, keys where they belong, peers treated fairly."""

import json
import subprocess

import pytest

from bench.transport import peer
from bench.transport.exchange import answer, question
from bench.transport.front_door import Behind, Ports, make_key, settings
from services.kit import keyring


def test_the_request_is_whole_and_says_how_long_it_is():
    head, _, body = question().partition(b"\r\n\r\n")

    assert f"content-length: {len(body)}".encode() in head.split(b"\r\n")
    assert json.loads(body)["messages"]
    assert b"authorization" not in head


def test_a_key_is_shown_in_the_head_and_changes_nothing_else():
    with_key = question("om-key")

    assert with_key.replace(b"authorization: Bearer om-key\r\n", b"") == question()


def test_the_answer_counts_its_tokens_so_that_no_proxy_must():
    assert json.loads(answer())["usage"]["total_tokens"] == 22


def test_the_key_that_is_made_lets_its_holder_in(tmp_path):
    text = make_key(tmp_path)

    (key,) = keyring.read(keyring.keyring_path(tmp_path))
    assert key.sha256 == keyring.digest(text)
    assert key.is_active(0)


def test_chats_go_to_the_worker_and_speech_to_the_one_that_streams(tmp_path):
    chosen = settings(Ports(*range(1, 9)), Behind(41, 42, "http://127.0.0.1:43"), tmp_path)

    assert chosen["OMNISERVE_LLM_UPSTREAM"] == "http://127.0.0.1:41"
    assert chosen["OMNISERVE_TTS_UPSTREAM"] == "http://127.0.0.1:42"
    assert chosen["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://127.0.0.1:43"


def test_litellm_has_one_model_at_the_worker_and_neither_database_nor_key():
    config = json.loads(peer.litellm_config(8000))

    (model,) = config["model_list"]
    assert model["model_name"] == json.loads(question().partition(b"\r\n\r\n")[2])["model"]
    assert model["litellm_params"]["api_base"] == "http://127.0.0.1:8000/v1"
    assert "general_settings" not in config
    assert peer.litellm_environ({}, peer.folder())["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] == "true"


def test_nothing_of_the_mesh_reaches_the_peers_environment(tmp_path):
    environ = {"OMNISERVE_X": "1", "OTEL_X": "1", "PYTHONPATH": "/x", "PATH": "/bin", "HOME": "/h"}
    kept = peer.litellm_environ(environ, tmp_path)

    assert kept["HOME"] == "/h"
    assert kept["PATH"] == f"{tmp_path}/bin:/bin"
    assert not {"OMNISERVE_X", "OTEL_X", "PYTHONPATH"} & set(kept)


def test_a_half_installed_peer_counts_as_none(tmp_path):
    root = peer.folder("1.0", tmp_path)
    (root / "bin").mkdir(parents=True)
    assert peer.installed("1.0", tmp_path) is None

    (root / "installed.json").write_text(json.dumps(peer.requirements("1.0")))
    assert peer.installed("1.0", tmp_path) == root
    assert peer.install("1.0", tmp_path) == root


def test_an_install_that_fails_is_told_with_the_version(tmp_path, monkeypatch):
    def fails(command, **_):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(peer.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(peer.subprocess, "run", fails)

    with pytest.raises(peer.PeerError, match=r"LiteLLM 1\.0"):
        peer.install("1.0", tmp_path)
