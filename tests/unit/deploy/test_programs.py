import configparser
from pathlib import Path

from deploy.programs import Paths, programs, supervisord_configuration

ROOT = Path("/opt/100% mesh")
STATE = Path("/var/lib/mesh")
PATHS = Paths(ROOT, STATE / "supervisord.conf", STATE / "s.sock", STATE / "s.pid", STATE / "logs")


def planned(**changes):
    return programs(**{"python": "/v/python", "root": ROOT, "grace_s": 8.0, "edge_drain_s": 31, "tie": (), **changes})


def configuration():
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";", "#"))
    parser.read_string(supervisord_configuration(planned(), PATHS, open_files=4096, user="me"))
    return parser


def test_envoy_starts_last_so_it_stops_first():
    parser = configuration()
    order = {
        name: int(parser[f"program:{name}"]["priority"])
        for name in ("admission", "vram", "relay", "llm", "diffusion", "jobs", "facade", "envoy")
    }
    assert max(order, key=order.get) == "envoy"


def test_everything_may_drain_before_it_is_killed():
    waits = {each.name: each.stop_wait_s for each in planned(grace_s=8.0, edge_drain_s=31)}
    assert waits["envoy"] > 31
    assert all(wait > 8 for wait in waits.values())


def test_a_crashed_process_comes_back_and_nothing_gives_up():
    for name in ("admission", "vram", "relay", "llm", "diffusion", "jobs", "facade", "envoy"):
        section = configuration()[f"program:{name}"]
        assert section["autorestart"] == "true"
        assert int(section["startsecs"]) > 0
        assert int(section["startretries"]) > 10_000


def test_a_percent_sign_and_a_space_in_a_path_survive():
    command = configuration()["program:envoy"]["command"]
    assert command == "bash '/opt/100%% mesh/envoy/run.sh'"


def test_processes_are_tied_to_supervisord_where_the_system_can():
    tied = planned(tie=("setpriv", "--pdeathsig", "TERM", "--"))
    assert all(each.command[:3] == ("setpriv", "--pdeathsig", "TERM") for each in tied)


def test_only_the_owner_reaches_the_control_socket():
    assert configuration()["unix_http_server"]["chmod"] == "0700"
