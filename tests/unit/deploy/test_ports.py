import socket
from contextlib import closing

import pytest

from deploy.ports import Listen, problems


@pytest.fixture
def taken():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


def test_a_taken_port_is_named_with_its_setting_and_its_holder(taken):
    (sentence,) = problems([Listen("127.0.0.1", taken, "OMNISERVE_EDGE_PORT")])
    assert f"port {taken} is already in use" in sentence
    assert "OMNISERVE_EDGE_PORT" in sentence
    assert "(pid " in sentence


def test_a_free_port_is_no_problem(free_ports):
    (port,) = free_ports(1)
    assert problems([Listen("127.0.0.1", port, "A")]) == []


def test_one_port_for_two_processes_is_named_with_both_settings(free_ports):
    (port,) = free_ports(1)
    (sentence,) = problems([Listen("127.0.0.1", port, "A_PORT"), Listen("127.0.0.1", port, "B_PORT")])
    assert "A_PORT" in sentence
    assert "B_PORT" in sentence


def test_an_address_of_another_machine_is_named():
    (sentence,) = problems([Listen("192.0.2.77", 8791, "OMNISERVE_EDGE_PORT")])
    assert "192.0.2.77:8791" in sentence
