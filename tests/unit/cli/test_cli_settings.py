"""Where the command looks for the mesh."""

import pytest

from cli.settings import CliSettings
from services.kit.settings import load


def doors(**variables):
    settings = load(CliSettings, variables)
    return settings.public_door, settings.operator_door


def test_without_settings_the_doors_are_this_machines():
    assert doors() == ("http://127.0.0.1:8791", "http://127.0.0.1:8792")


@pytest.mark.parametrize("name", ["OMNISERVE_EDGE_PORT", "OMNISERVE_PORT"])
def test_the_ports_of_the_front_door_are_followed(name):
    moved = {name: "9001", "OMNISERVE_EDGE_OPERATOR_PORT": "9002"}
    assert doors(**moved) == ("http://127.0.0.1:9001", "http://127.0.0.1:9002")


def test_an_address_that_is_given_wins_over_the_ports():
    said = {"OMNISERVE_CLI_URL": "https://box.example", "OMNISERVE_CLI_OPERATOR_URL": "http://127.0.0.1:1"}
    assert doors(OMNISERVE_PORT="9001", **said) == ("https://box.example", "http://127.0.0.1:1")
