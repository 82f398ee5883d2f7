"""Native gRPC and gRPC-Web through the front door, with reflection and the door's own token."""

import struct
from contextlib import closing

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from omniserve.admission.v1 import admission_pb2, admission_pb2_grpc
from omniserve.llm.v1 import llm_pb2, llm_pb2_grpc

pytestmark = pytest.mark.e2e

LIST_MODELS = "/omniserve.llm.v1.LlmService/ListModels"


@pytest.fixture
def public(door):
    with closing(grpc.insecure_channel(door.public_target)) as channel:
        yield channel


@pytest.fixture
def operator(door):
    with closing(grpc.insecure_channel(door.operator_target)) as channel:
        yield channel


def code_of(call, request, metadata=()):
    with pytest.raises(grpc.RpcError) as failure:
        call(request, metadata=metadata, timeout=60)
    return failure.value.code()


def frames(body):
    """Split a gRPC-Web body into (is trailer, payload)."""
    found = []
    while body:
        flags, length = struct.unpack(">BI", body[:5])
        found.append((bool(flags & 0x80), body[5 : 5 + length]))
        body = body[5 + length :]
    return found


def test_a_native_caller_is_anonymous_with_the_tier_it_asked_for(public):
    metadata = (("x-omniserve-tier", "background"), ("x-omniserve-client", "somebody-rich"))
    models = llm_pb2_grpc.LlmServiceStub(public).ListModels(llm_pb2.ListModelsRequest(), metadata=metadata, timeout=60)
    assert models.models[0].name == "envoy-public"
    assert list(models.models[0].aliases) == ["anonymous", "background"]


def test_a_stream_comes_through_in_order(public):
    events = list(llm_pb2_grpc.LlmServiceStub(public).Chat(llm_pb2.ChatRequest(), timeout=60))
    assert [event.WhichOneof("event") for event in events] == ["output", "output", "done"]


def test_reflection_lists_the_services(public):
    assert "omniserve.llm.v1.LlmService" in ProtoReflectionDescriptorDatabase(public).get_services()


def test_health_is_answered_through_the_door(public):
    answer = health_pb2_grpc.HealthStub(public).Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_operator_rpcs_are_closed_to_the_public_whatever_the_metadata(public, door):
    spoofed = (("x-omniserve-service-token", door.token("envoy-operator")), ("x-omniserve-listener", "operator"))
    status = llm_pb2_grpc.LlmServiceStub(public).GetStatus
    assert code_of(status, llm_pb2.GetStatusRequest(), spoofed) is grpc.StatusCode.PERMISSION_DENIED
    load = llm_pb2_grpc.LlmAdminServiceStub(public).LoadModel
    assert code_of(load, llm_pb2.LoadModelRequest(), spoofed) is grpc.StatusCode.UNIMPLEMENTED
    admission = admission_pb2_grpc.AdmissionServiceStub(public).GetStatus
    assert code_of(admission, admission_pb2.GetStatusRequest(), spoofed) is grpc.StatusCode.UNIMPLEMENTED


def test_operator_rpcs_are_open_on_the_operator_listener(operator):
    llm_pb2_grpc.LlmServiceStub(operator).GetStatus(llm_pb2.GetStatusRequest(), timeout=60)
    loaded = llm_pb2_grpc.LlmAdminServiceStub(operator).LoadModel(llm_pb2.LoadModelRequest(), timeout=60)
    assert loaded.model.name == "envoy-operator"
    state = admission_pb2_grpc.AdmissionServiceStub(operator).GetStatus(admission_pb2.GetStatusRequest(), timeout=60)
    assert state.epoch == 7


def test_mesh_rpcs_are_closed_on_both_listeners(public, operator):
    for channel in (public, operator):
        session = llm_pb2_grpc.LlmServiceStub(channel).GenerateSession(iter(()), timeout=60)
        with pytest.raises(grpc.RpcError) as failure:
            next(session)
        assert failure.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_grpc_web_call_from_a_browser_is_answered(door):
    response = httpx.post(
        f"{door.public_url}{LIST_MODELS}",
        headers={"content-type": "application/grpc-web+proto", "x-grpc-web": "1"},
        content=struct.pack(">BI", 0, 0),
    )
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("application/grpc-web")
    (_, message), (is_trailer, trailer) = frames(response.content)
    assert llm_pb2.ListModelsResponse.FromString(message).models[0].name == "envoy-public"
    assert is_trailer
    assert b"grpc-status:0" in trailer.replace(b" ", b"")


def test_a_dead_service_is_unavailable_with_a_plain_sentence(open_door, tmp_path, free_ports):
    nowhere = f"127.0.0.1:{free_ports(1)[0]}"
    with (
        open_door(tmp_path, OMNISERVE_LLM_ADDRESS=nowhere, OMNISERVE_EDGE_HOLD_S="1") as door,
        grpc.insecure_channel(door.public_target) as channel,
        pytest.raises(grpc.RpcError) as failure,
    ):
        llm_pb2_grpc.LlmServiceStub(channel).ListModels(llm_pb2.ListModelsRequest(), timeout=20)
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    assert failure.value.details()
    assert "{" not in failure.value.details()


def test_plain_http_cannot_reach_a_service_over_http_1(door):
    response = httpx.post(
        f"{door.public_url}{LIST_MODELS}", headers={"content-type": "application/json"}, content=b"{}"
    )
    assert response.status_code >= 400
