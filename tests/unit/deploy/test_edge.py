import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from google.protobuf import descriptor_pool

from deploy.edge import TEMPLATE, render, wrapper_variables, write
from deploy.edge_settings import EdgeSettings
from deploy.replies import REPLIES, local_reply_config
from omniserve.admission.v1 import admission_pb2
from omniserve.llm.v1 import llm_pb2
from omniserve.options.v1 import options_pb2
from services.kit.access import BUILT_IN_SERVICES
from services.kit.errors import Reason
from services.kit.settings import SettingsError, load

ENVOY = Path(sys.executable).with_name("envoy")
SERVED = (llm_pb2, admission_pb2)


def rendered(**values):
    return yaml.safe_load(render(TEMPLATE.read_text(), EdgeSettings(**values)))


def listener(tree, name):
    return next(each for each in tree["static_resources"]["listeners"] if each["name"] == name)


def connection_manager(tree, name):
    return listener(tree, name)["filter_chains"][0]["filters"][0]["typed_config"]


def routed_services(tree, name):
    hosts = connection_manager(tree, name)["route_config"]["virtual_hosts"]
    prefixes = [route["match"].get("prefix", "") for host in hosts for route in host["routes"] if "route" in route]
    return {match[1] for prefix in prefixes if (match := re.fullmatch(r"/([a-zA-Z0-9_.]+\.[A-Za-z]+)/", prefix))}


def services_with(*audiences):
    found = set()
    for module in SERVED:
        for service in module.DESCRIPTOR.services_by_name.values():
            methods = [method.GetOptions().Extensions[options_pb2.access].audience for method in service.methods]
            if set(audiences) & set(methods):
                found.add(service.full_name)
    return found


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"otlp_endpoint": "http://collector:4317"},
        {"bind": "::1", "facade_address": "[::1]:9100", "operator_hosts": ("box.lan",), "workers": 2},
        {"bind": "0.0.0.0", "allow_anonymous": True, "operator_origins": ("https://panel.example:8443",)},
    ],
)
def test_envoy_accepts_what_is_rendered(tmp_path, values):
    path = write(EdgeSettings(state_dir=tmp_path, **values))
    result = subprocess.run(
        [str(ENVOY), "--mode", "validate", "-c", str(path), "--log-level", "error"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_public_listener_routes_exactly_the_services_with_public_rpcs():
    assert routed_services(rendered(), "public") - BUILT_IN_SERVICES == services_with(options_pb2.AUDIENCE_PUBLIC)


def test_the_operator_listener_routes_exactly_the_services_with_rpcs_for_the_operator():
    wanted = services_with(options_pb2.AUDIENCE_PUBLIC, options_pb2.AUDIENCE_OPERATOR)
    assert routed_services(rendered(), "operator") - BUILT_IN_SERVICES == wanted


def test_every_routed_service_has_a_contract():
    for service in routed_services(rendered(), "operator") - BUILT_IN_SERVICES:
        assert descriptor_pool.Default().FindServiceByName(service)


def test_both_listeners_sanitise_alike():
    tree = rendered()
    public, operator = connection_manager(tree, "public"), connection_manager(tree, "operator")
    different = {"stat_prefix", "route_config"}
    assert {k: v for k, v in public.items() if k not in different} == {
        k: v for k, v in operator.items() if k not in different
    }


def test_no_token_is_written_into_the_configuration(tmp_path):
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "envoy-operator").write_text("t0ken" * 10)
    assert "t0ken" not in write(EdgeSettings(state_dir=tmp_path)).read_text()


def test_without_a_collector_nothing_is_traced():
    assert "tracing" not in connection_manager(rendered(), "public")
    assert connection_manager(rendered(otlp_endpoint="http://c:4317"), "public")["tracing"]["max_path_tag_length"] == 0


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
    shapes = [m["body_format_override"]["json_format"] for m in local_reply_config()["mappers"][2:]]
    assert all({"message", "type", "param", "code"} <= set(shape["error"]) for shape in shapes)
    json.dumps(shapes)


def test_the_wrapper_reads_numbers_only(tmp_path):
    assert re.fullmatch(r"([A-Z_]+=\d+\n)+", wrapper_variables(EdgeSettings(state_dir=tmp_path)))
