"""A native gRPC client through Envoy: reflection, streaming, cancellation, and what it may not reach."""

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from omniserve.admission.v1 import admission_pb2, admission_pb2_grpc
from omniserve.diffusion.v1 import diffusion_pb2, diffusion_pb2_grpc
from omniserve.llm.v1 import llm_pb2, llm_pb2_grpc

QUESTION = llm_pb2.Message(role="user", content=[llm_pb2.ContentPart(text="What is the capital of France?")])


@pytest.fixture
def channel(mesh):
    with grpc.insecure_channel(mesh.public_target) as channel:
        yield channel


def test_a_chat_streams_tokens_and_ends_with_done(channel):
    request = llm_pb2.ChatRequest(messages=[QUESTION])
    request.options.sampling.temperature = 0
    events = list(llm_pb2_grpc.LlmServiceStub(channel).Chat(request, timeout=60))
    text = "".join(choice.text for event in events for choice in event.output.choices)
    assert "Paris" in text
    assert events[-1].WhichOneof("event") == "done"
    assert events[-1].done.usage.completion_tokens > 0


def test_a_client_without_stubs_finds_and_calls_the_service_by_reflection(channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    assert "omniserve.llm.v1.LlmService" in database.get_services()
    pool = descriptor_pool.DescriptorPool(database)
    method = pool.FindServiceByName("omniserve.llm.v1.LlmService").FindMethodByName("Tokenize")
    request = message_factory.GetMessageClass(method.input_type)(text="Hello world")
    answer = channel.unary_unary(
        "/omniserve.llm.v1.LlmService/Tokenize",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )(request, timeout=30)
    assert len(answer.tokens) >= 2


def test_a_mesh_rpc_cannot_be_reached_through_the_public_door(channel):
    requests = iter([llm_pb2.GenerateSessionRequest()])
    with pytest.raises(grpc.RpcError) as refused:
        list(llm_pb2_grpc.LlmServiceStub(channel).GenerateSession(requests, timeout=30))
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED


def test_an_operator_rpc_cannot_be_reached_through_the_public_door(channel):
    with pytest.raises(grpc.RpcError) as refused:
        llm_pb2_grpc.LlmServiceStub(channel).GetStatus(llm_pb2.GetStatusRequest(), timeout=30)
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(grpc.RpcError) as refused:
        llm_pb2_grpc.LlmAdminServiceStub(channel).LoadModel(llm_pb2.LoadModelRequest(), timeout=30)
    assert refused.value.code() in {
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.PERMISSION_DENIED,
    }


def test_a_service_cannot_be_called_without_a_token(mesh):
    with grpc.insecure_channel(mesh.address("admission")) as direct, pytest.raises(grpc.RpcError) as refused:
        admission_pb2_grpc.AdmissionServiceStub(direct).GetStatus(admission_pb2.GetStatusRequest(), timeout=30)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_bad_request_carries_its_reason_and_field(channel):
    request = llm_pb2.ChatRequest(messages=[QUESTION])
    request.options.sampling.temperature = -1
    with pytest.raises(grpc.RpcError) as refused:
        list(llm_pb2_grpc.LlmServiceStub(channel).Chat(request, timeout=30))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(refused.value)
    info = error_details_pb2.ErrorInfo()
    assert status is not None
    assert any(detail.Unpack(info) for detail in status.details)
    assert info.reason == "invalid_request"
    assert "temperature" in info.metadata["field"]


def test_pictures_are_reached_natively_and_without_a_model_the_setting_is_named(channel):
    stub = diffusion_pb2_grpc.DiffusionServiceStub(channel)
    kinds = {model.kind for model in stub.ListModels(diffusion_pb2.ListModelsRequest(), timeout=120).models}
    assert diffusion_pb2.MODEL_KIND_IMAGE not in kinds
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.GenerateImage(diffusion_pb2.GenerateImageRequest(prompt="a cat"), timeout=120))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    assert "OMNISERVE_SD_MODEL" in refused.value.details()
