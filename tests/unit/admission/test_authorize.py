from pathlib import Path

import pytest
from envoy_subset import ext_authz_pb2 as pb

from services.admission.adapters.keys import KeyFiles
from services.admission.authorize import Authorizer
from services.admission.core.identity import Policy
from services.kit import keyring
from services.kit.clock import ManualClock
from services.kit.config import ConfigError
from services.kit.keyring import Key, KeyringError
from services.kit.tokens import TokenBook, ensure_token


class Office:
    """An authorizer, its clock and its files."""

    def __init__(self, folder: Path, policy: Policy | None = None) -> None:
        self.clock = ManualClock()
        self.path = keyring.keyring_path(folder)
        self.config = folder / "omniserve.yaml"
        self.config.write_text("")
        self.files = KeyFiles(keyring_path=self.path, config_path=self.config, secret="sesame")
        self.authorizer = Authorizer(self.files, TokenBook(folder), policy or Policy(), self.clock.wall)

    def add(self, name: str, tier: str = "sub", **more: float) -> None:
        """Make a key whose text is the name."""
        key = Key(name, keyring.digest(name), tier, created=self.clock.wall(), **more)
        keyring.add(self.path, key, now=self.clock.wall())

    def ask(self, listener: str = "public", path: str = "/", **headers: str) -> pb.CheckResponse:
        question = pb.CheckRequest()
        question.attributes.context_extensions["listener"] = listener
        question.attributes.request.http.path = path
        for name, value in headers.items():
            question.attributes.request.http.headers[name.replace("_", "-")] = value
        return pb.CheckResponse.FromString(self.authorizer.answer(question.SerializeToString()))

    def who(self, listener: str = "public", path: str = "/", **headers: str) -> tuple[str, str] | int:
        """Return client and tier, or the status of the refusal."""
        answer = self.ask(listener, path, **headers)
        if answer.HasField("denied_response"):
            return answer.denied_response.status.code
        assert answer.status.code == 0
        said = {option.header.key: option.header.value for option in answer.ok_response.headers}
        return said["x-omniserve-client"], said["x-omniserve-tier"]


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


def test_a_key_is_asked_for_anew_when_its_time_is_over(office):
    office.add("alice", expires=office.clock.wall() + 60)
    for _ in range(2):
        assert office.who(x_api_key="alice") == ("alice", "sub")
    office.clock.advance(59)
    assert office.who(x_api_key="alice") == ("alice", "sub")
    office.clock.advance(1)
    assert office.who(x_api_key="alice") == 401


def test_a_key_is_known_at_once_and_forgotten_when_the_files_are_looked_at(office):
    assert office.who(x_api_key="bob") == 401
    office.add("bob")
    assert office.who(x_api_key="bob") == ("bob", "sub")
    keyring.revoke(office.path, "bob", now=office.clock.wall())
    assert office.files.refresh()
    assert office.who(x_api_key="bob") == 401


def test_keys_of_the_configuration_come_and_go_with_its_text(office):
    office.config.write_text(f"keys: [{{name: carol, sha256: {keyring.digest('carol')}, tier: paid}}]")
    assert office.who(x_api_key="carol") == ("carol", "paid")
    office.config.write_text("keys: [{name: carol}]")
    assert not office.files.refresh()
    assert office.who(x_api_key="carol") == ("carol", "paid")
    office.config.write_text("keys: []")
    assert office.files.refresh()
    assert office.who(x_api_key="carol") == 401


def test_what_cannot_be_read_at_first_stops_the_start(tmp_path):
    config = tmp_path / "omniserve.yaml"
    config.write_text("keys: [{name: x}]")
    with pytest.raises(ConfigError):
        KeyFiles(keyring_path=tmp_path / "keys.json", config_path=config, secret="")
    (tmp_path / "keys.json").write_text("{")
    with pytest.raises(KeyringError):
        KeyFiles(keyring_path=tmp_path / "keys.json", config_path=None, secret="")


def test_equal_requests_through_different_doors_get_different_answers(tmp_path):
    office = Office(tmp_path, Policy(operator_token="sesame"))
    for _ in range(2):
        assert office.who("public", authorization="Bearer sesame", x_omniserve_tier="paid") == ("shared", "paid")
        assert office.who("operator", authorization="Bearer sesame", x_omniserve_tier="paid") == ("operator", "paid")
        assert office.who("mesh", authorization="Bearer sesame", x_omniserve_tier="paid") == 401
        assert office.who("elsewhere", authorization="Bearer sesame") == ("shared", "free")


def test_only_who_speaks_for_clients_is_believed_about_them(office, tmp_path):
    for service, booked in (("relay", "alice"), ("jobs", "alice"), ("facade", "alice"), ("llm", "llm")):
        token = ensure_token(tmp_path, service)
        assert office.who("mesh", x_om_service_token=token, x_om_client="alice") == (booked, "free")
        assert office.who("mesh", x_om_service_token=token) == (service, "free")
    office.add("carol")
    assert office.who("public", x_api_key="carol", x_om_client="alice") == ("carol", "sub")
    assert office.who("mesh", x_om_client="alice") == 401


def test_a_service_whose_token_is_gone_is_not_let_in_from_memory(office, tmp_path):
    token = ensure_token(tmp_path, "jobs")
    assert office.who("mesh", x_om_service_token=token) == ("jobs", "free")
    assert office.who("mesh", x_om_service_token=token[:-1]) == 401


def test_credentials_end_here(office):
    plain = office.ask(path="/?secret=ignored", x_api_key="sesame").ok_response
    assert {"authorization", "x-api-key", "x-rapid-api-key", "secret"} <= set(plain.headers_to_remove)


def test_what_envoy_would_never_send_is_refused_without_a_fuss(office):
    answer = pb.CheckResponse.FromString(office.authorizer.answer(b"\x22\xff"))
    assert answer.denied_response.status.code == 400
    assert office.who(x_api_key="sesame") == ("shared", "free")


def test_many_ways_to_write_a_tier_do_not_fill_the_memory(office):
    for number in range(10_050):
        assert office.who(x_api_key="sesame", x_omniserve_tier=f"paid{' ' * number}") == ("shared", "paid")
    assert len(office.authorizer._ready) <= 10_000
