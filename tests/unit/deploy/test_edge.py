import json
import re
from pathlib import Path

import pytest
import yaml

from deploy.edge import TEMPLATE, render, wrapper_variables, write
from deploy.edge_settings import EdgeSettings
from deploy.replies import REPLIES, gate_reply_config, local_reply_config
from facade.settings import FacadeSettings
from services.kit.config import Document
from services.kit.errors import Reason
from services.kit.settings import SettingsError, load
from services.relay.adapters.door import read_door
from services.relay.inputs import assemble
from services.relay.settings import RelaySettings


def rendered(**values):
    return yaml.safe_load(render(TEMPLATE.read_text(), EdgeSettings(**values)))


def listener(tree, name):
    return next(each for each in tree["static_resources"]["listeners"] if each["name"] == name)


def connection_manager(tree, name):
    return listener(tree, name)["filter_chains"][0]["filters"][0]["typed_config"]


def mutations(tree, name):
    (extension,) = connection_manager(tree, name)["early_header_mutation_extensions"]
    return extension["typed_config"]["mutations"]


def test_all_listeners_treat_requests_alike():
    tree = rendered()
    public, operator, mesh = (connection_manager(tree, name) for name in ("public", "operator", "mesh"))
    own = {"stat_prefix", "rds"}
    assert {k: v for k, v in public.items() if k not in own} == {k: v for k, v in operator.items() if k not in own}
    own |= {"early_header_mutation_extensions", "preserve_external_request_id"}
    assert {k: v for k, v in public.items() if k not in own} == {k: v for k, v in mesh.items() if k not in own}


@pytest.mark.parametrize("name", ["public", "operator", "mesh"])
def test_what_callers_say_in_the_meshs_name_goes_before_anything_reads_it(name):
    stripped = [
        each["remove_on_match"]["key_matcher"] for each in mutations(rendered(), name) if "remove_on_match" in each
    ]
    assert [each["prefix"] for each in stripped] == ["x-om-", "x-omniserve-", "x-envoy-"]
    assert all(each["ignore_case"] for each in stripped)


def test_a_service_token_is_put_aside_on_the_mesh_listener_only():
    kept = {
        name: str(mutations(rendered(), name)).count("x-om-service-token") for name in ("public", "operator", "mesh")
    }
    assert kept == {"public": 0, "operator": 0, "mesh": 1}


def test_the_gate_has_no_address_that_a_process_could_connect_to():
    gate = listener(rendered(), "gate")
    assert "address" not in gate
    assert gate["internal_listener"] == {}


def test_one_setting_is_the_largest_body_of_every_room():
    said = {"OMNISERVE_BODY_LIMIT_MIB": "12"}
    assert load(EdgeSettings, said).body_limit_mib == load(FacadeSettings, said).body_limit_mib == 12
    relay = load(RelaySettings, said)
    upstreams = assemble(relay, Document(), environ={}, route_ids=()).upstreams
    assert {each.max_body_mib for each in upstreams.values()} == {12}


def test_everything_is_told_to_relay_that_routes_must_know(tmp_path):
    write(EdgeSettings(state_dir=tmp_path, operator_hosts=("box.lan",), body_limit_mib=12))
    door = read_door(tmp_path)
    assert door.facts.operator_hosts[-1] == "box.lan"
    assert door.facts.body_limit_mib == 12
    assert not door.facts.checks_everybody
    assert Path(door.facts.ca).is_file()


@pytest.mark.parametrize("values", [{"bind": "0.0.0.0", "allow_anonymous": True}, {"anonymous_tier": "free"}])
def test_callers_are_checked_where_not_everybody_may_ask_for_anything(tmp_path, values):
    write(EdgeSettings(state_dir=tmp_path, **values))
    assert read_door(tmp_path).facts.checks_everybody


def test_no_token_is_written_into_the_configuration(tmp_path):
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "envoy-operator").write_text("t0ken" * 10)
    assert "t0ken" not in write(EdgeSettings(state_dir=tmp_path)).read_text()


def test_without_a_collector_nothing_is_traced():
    assert "tracing" not in connection_manager(rendered(), "public")
    tracing = connection_manager(rendered(otlp_endpoint="http://c:4317", traced_percent=1.0), "public")["tracing"]
    assert tracing["max_path_tag_length"] == 0
    assert "random_sampling" not in tracing, "it would leave out most of what callers want to have traced"
    sampler = tracing["provider"]["typed_config"]["sampler"]
    share = sampler["typed_config"]["wrapped_sampler"]["typed_config"]["sampling_percentage"]
    assert (sampler["name"].rpartition(".")[2], share) == (
        "parent_based",
        {"numerator": 10_000, "denominator": "MILLION"},
    )


@pytest.mark.parametrize("bind", ["0.0.0.0", "192.168.1.5", "::"])
def test_the_door_does_not_open_to_others_for_anonymous_callers(bind):
    with pytest.raises(SettingsError, match="OMNISERVE_ALLOW_ANONYMOUS=1"):
        load(EdgeSettings, {"OMNISERVE_BIND": bind})
    assert load(EdgeSettings, {"OMNISERVE_BIND": bind, "OMNISERVE_ALLOW_ANONYMOUS": "1"}).bind == bind


def test_in_a_container_the_published_address_decides():
    inside = {"OMNISERVE_EDGE_BIND": "0.0.0.0", "OMNISERVE_EDGE_OPERATOR_BIND": "0.0.0.0"}
    assert load(EdgeSettings, {**inside, "OMNISERVE_EDGE_PUBLISHED_BIND": "127.0.0.1"})
    with pytest.raises(SettingsError, match="anonymous"):
        load(EdgeSettings, {**inside, "OMNISERVE_EDGE_PUBLISHED_BIND": "0.0.0.0"})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OMNISERVE_EDGE_PORT", "0"),
        ("OMNISERVE_EDGE_PORT", "many"),
        ("OMNISERVE_EDGE_OPERATOR_BIND", "0.0.0.0"),
        ("OMNISERVE_EDGE_OPERATOR_HOSTS", "a b"),
        ("OMNISERVE_EDGE_OPERATOR_ORIGINS", "panel.example"),
        ("OMNISERVE_EDGE_DRAIN_NOTICE_S", "0"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://collector:4317"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(variable, value):
    with pytest.raises(SettingsError, match=variable):
        load(EdgeSettings, {variable: value})


def test_every_reply_has_a_reason_of_the_mesh_and_openais_four_fields():
    for reply in REPLIES:
        assert reply.reason in set(Reason)
    shapes = [m["body_format_override"]["json_format"] for m in local_reply_config()["mappers"][4:]]
    shapes += [m["body_format_override"]["json_format"] for m in gate_reply_config()["mappers"]]
    assert all({"message", "type", "param", "code"} <= set(shape["error"]) for shape in shapes)
    json.dumps(shapes)


def test_the_gate_leaves_admissions_own_refusals_alone():
    unadmitted, *others = gate_reply_config()["mappers"]
    assert (unadmitted["status_code"], unadmitted["body_format_override"]["json_format"]["error"]["code"]) == (
        503,
        "admission_unavailable",
    )
    # Only what Envoy itself notes a reason for is put into words: a broken exchange, a worker that is not there.
    assert all("response_flag_filter" in each["filter"]["and_filter"]["filters"][1] for each in others)
    assert others[0]["status_code"] == 502


def test_a_caller_whom_admission_turned_away_reads_admissions_words():
    _grpc, unchecked, turned_away, *_ = local_reply_config()["mappers"]
    assert unchecked["body_format_override"]["json_format"]["error"]["reason"] == "admission_unavailable"
    assert turned_away["filter"] == {"response_flag_filter": {"flags": ["UAEX"]}}
    assert turned_away["body_format_override"]["text_format_source"]["inline_string"] == "%LOCAL_REPLY_BODY%"


def test_the_wrapper_reads_numbers_only(tmp_path):
    assert re.fullmatch(r"([A-Z_]+=\d+\n)+", wrapper_variables(EdgeSettings(state_dir=tmp_path)))
