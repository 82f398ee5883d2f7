"""Who may call: tokens, audiences and what callers say about their clients, on real servers."""

# ruff: noqa: N802 - servicer methods carry the contract's names

from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from google.longrunning import operations_pb2_grpc

from omniserve.admission.v1 import admission_pb2, admission_pb2_grpc
from omniserve.llm.v1 import llm_pb2, llm_pb2_grpc
from services.kit.access import TOKEN_KEY, AccessRulesMissingError, Caller, caller_of
from services.kit.channels import call_metadata, open_channel
from services.kit.errors import Reason, from_rpc_error
from services.kit.server import running_server
from services.kit.settings import MeshSettings
from services.kit.tokens import ensure_token

LLM, LLM_ADMIN, ADMISSION = (
    "omniserve.llm.v1.LlmService",
    "omniserve.llm.v1.LlmAdminService",
    "omniserve.admission.v1.AdmissionService",
)


class Settings(MeshSettings):
    service = "llm"


class Llm(llm_pb2_grpc.LlmServiceServicer):
    """Notes who called."""

    def __init__(self):
        self.callers: list[Caller] = []

    async def Tokenize(self, request, context):
        self.callers.append(caller_of(context))
        return llm_pb2.TokenizeResponse()

    async def Chat(self, request, context):
        self.callers.append(caller_of(context))
        yield llm_pb2.ChatResponse()

    async def GetStatus(self, request, context):
        return llm_pb2.GetStatusResponse()

    async def GenerateSession(self, request_iterator, context):
        async for _ in request_iterator:
            yield llm_pb2.GenerateSessionResponse()


class Admin(llm_pb2_grpc.LlmAdminServiceServicer):
    async def LoadModel(self, request, context):
        return llm_pb2.LoadModelResponse()


class Admission(admission_pb2_grpc.AdmissionServiceServicer):
    async def Acquire(self, request_iterator, context):
        async for _ in request_iterator:
            yield admission_pb2.AcquireResponse()


@asynccontextmanager
async def mesh(state_dir, **settings):
    llm = Llm()

    def register(server):
        llm_pb2_grpc.add_LlmServiceServicer_to_server(llm, server)
        llm_pb2_grpc.add_LlmAdminServiceServicer_to_server(Admin(), server)
        admission_pb2_grpc.add_AdmissionServiceServicer_to_server(Admission(), server)

    async with running_server(
        name="llm",
        settings=Settings(state_dir=state_dir, **settings),
        register=register,
        service_names=[LLM, LLM_ADMIN, ADMISSION],
    ) as port:
        yield llm, f"127.0.0.1:{port}"


CALLS = {
    "public unary": lambda c: llm_pb2_grpc.LlmServiceStub(c).Tokenize(llm_pb2.TokenizeRequest()),
    "public stream": lambda c: llm_pb2_grpc.LlmServiceStub(c).Chat(llm_pb2.ChatRequest()).read(),
    "operator": lambda c: llm_pb2_grpc.LlmServiceStub(c).GetStatus(llm_pb2.GetStatusRequest()),
    "operator admin": lambda c: llm_pb2_grpc.LlmAdminServiceStub(c).LoadModel(llm_pb2.LoadModelRequest()),
    "mesh": lambda c: admission_pb2_grpc.AdmissionServiceStub(c).Acquire(iter([admission_pb2.AcquireRequest()])).read(),
    "mesh, facade only": lambda c: (
        llm_pb2_grpc.LlmServiceStub(c).GenerateSession(iter([llm_pb2.GenerateSessionRequest()])).read()
    ),
}
ALL = set(CALLS)
PUBLIC = {"public unary", "public stream"}
OPERATOR = PUBLIC | {"operator", "operator admin"}


@pytest.mark.parametrize(
    ("caller", "allowed"),
    [
        ("envoy-public", PUBLIC),
        ("envoy-operator", OPERATOR),
        ("cli", OPERATOR),
        ("diffusion", OPERATOR | {"mesh"}),
        ("facade", ALL),
    ],
)
async def test_each_caller_reaches_its_audience_and_nothing_beyond(tmp_path, caller, allowed):
    outcomes = {}
    async with mesh(tmp_path) as (_, address), open_channel(address, caller=caller, state_dir=tmp_path) as channel:
        for name, call in CALLS.items():
            try:
                await call(channel)
                outcomes[name] = None
            except grpc.aio.AioRpcError as error:
                outcomes[name] = (error.code(), from_rpc_error(error).reason)
    refused = (grpc.StatusCode.PERMISSION_DENIED, Reason.FORBIDDEN)
    assert outcomes == {name: None if name in allowed else refused for name in CALLS}


@pytest.mark.parametrize("token", [None, "", "x" * 43])
async def test_without_a_token_of_the_mesh_nothing_is_answered(tmp_path, token):
    metadata = () if token is None else ((TOKEN_KEY, token),)
    async with mesh(tmp_path) as (llm, address), grpc.aio.insecure_channel(address) as channel:
        stub = llm_pb2_grpc.LlmServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(llm_pb2.TokenizeRequest(), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            await stub.Chat(llm_pb2.ChatRequest(), metadata=metadata).read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert from_rpc_error(caught.value).reason is Reason.UNAUTHENTICATED
    assert stream.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert llm.callers == []


SPOOF = call_metadata(client="big-customer", tier="paid", request_id="req-1")


@pytest.mark.parametrize("caller", ["envoy-public", "envoy-operator", "facade", "jobs"])
async def test_client_and_tier_are_believed_from_those_who_speak_for_clients(tmp_path, caller):
    async with mesh(tmp_path) as (llm, address), open_channel(address, caller=caller, state_dir=tmp_path) as channel:
        await llm_pb2_grpc.LlmServiceStub(channel).Tokenize(llm_pb2.TokenizeRequest(), metadata=SPOOF)
    assert llm.callers == [Caller(caller, "big-customer", "paid", "req-1")]


@pytest.mark.parametrize("caller", ["cli", "diffusion", "facade-2"])
async def test_client_and_tier_from_anybody_else_are_ignored(tmp_path, caller):
    async with mesh(tmp_path) as (llm, address), open_channel(address, caller=caller, state_dir=tmp_path) as channel:
        await llm_pb2_grpc.LlmServiceStub(channel).Tokenize(llm_pb2.TokenizeRequest(), metadata=SPOOF)
        async for _ in llm_pb2_grpc.LlmServiceStub(channel).Chat(llm_pb2.ChatRequest(), metadata=SPOOF):
            pass
    assert llm.callers == [Caller(caller, caller, "free", "req-1")] * 2


async def test_a_second_token_or_tier_in_the_metadata_changes_nothing(tmp_path):
    stolen = ensure_token(tmp_path, "facade")
    extra = ((TOKEN_KEY, stolen), *SPOOF, ("x-omniserve-tier", "background"))
    async with mesh(tmp_path) as (llm, address), open_channel(address, caller="cli", state_dir=tmp_path) as channel:
        await llm_pb2_grpc.LlmServiceStub(channel).Tokenize(llm_pb2.TokenizeRequest(), metadata=extra)
    assert llm.callers[0].service == "cli"
    assert llm.callers[0].tier == "free"


async def test_a_tier_that_does_not_exist_is_refused_by_the_name_of_its_header(tmp_path):
    async with mesh(tmp_path) as (llm, address), open_channel(address, caller="facade", state_dir=tmp_path) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await llm_pb2_grpc.LlmServiceStub(channel).Tokenize(
                llm_pb2.TokenizeRequest(), metadata=(("x-omniserve-tier", "platinum"),)
            )
    error = from_rpc_error(caught.value)
    assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "x-omniserve-tier")
    assert llm.callers == []


@pytest.mark.parametrize("given", ["", "no spaces allowed", "x" * 129])
async def test_a_request_without_a_usable_id_gets_one_and_errors_repeat_it(tmp_path, given):
    async with mesh(tmp_path) as (llm, address), open_channel(address, caller="facade", state_dir=tmp_path) as channel:
        stub = llm_pb2_grpc.LlmServiceStub(channel)
        metadata = (("x-request-id", given),)
        await stub.Tokenize(llm_pb2.TokenizeRequest(), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(llm_pb2.TokenizeRequest(), metadata=(("x-omniserve-tier", "?"), ("x-request-id", "r7")))
    assert len(llm.callers[0].request_id) == 32
    assert from_rpc_error(caught.value).metadata["request_id"] == "r7"


async def test_a_service_that_starts_later_is_known_at_its_first_call(tmp_path):
    async with mesh(tmp_path) as (llm, address):
        for caller in ("facade", "late-starter"):
            async with open_channel(address, caller=caller, state_dir=tmp_path) as channel:
                await llm_pb2_grpc.LlmServiceStub(channel).Tokenize(llm_pb2.TokenizeRequest())
    assert [caller.service for caller in llm.callers] == ["facade", "late-starter"]


async def test_a_server_with_an_rpc_without_access_rule_does_not_start(tmp_path):
    def register(server):
        operations_pb2_grpc.add_OperationsServicer_to_server(operations_pb2_grpc.OperationsServicer(), server)

    with pytest.raises(AccessRulesMissingError, match="Operations/CancelOperation"):
        async with running_server(
            name="llm",
            settings=Settings(state_dir=tmp_path),
            register=register,
            service_names=["google.longrunning.Operations"],
        ):
            pytest.fail("the server started")


async def test_a_service_that_is_registered_but_not_named_does_not_start(tmp_path):
    """Its rules would never be read."""

    def register(server):
        llm_pb2_grpc.add_LlmServiceServicer_to_server(Llm(), server)
        operations_pb2_grpc.add_OperationsServicer_to_server(operations_pb2_grpc.OperationsServicer(), server)

    with pytest.raises(ValueError, match=r"google\.longrunning\.Operations"):
        async with running_server(
            name="llm", settings=Settings(state_dir=tmp_path), register=register, service_names=[LLM]
        ):
            pytest.fail("the server started")


async def test_token_checks_can_be_off_on_loopback_only(tmp_path):
    async with (
        mesh(tmp_path, check_tokens=False) as (llm, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        await llm_pb2_grpc.LlmServiceStub(channel).Tokenize(llm_pb2.TokenizeRequest())
    assert llm.callers[0].service == "unchecked"

    with pytest.raises(ValueError, match="loopback"):
        async with running_server(
            name="llm",
            settings=Settings(state_dir=tmp_path, check_tokens=False),
            register=lambda server: llm_pb2_grpc.add_LlmServiceServicer_to_server(Llm(), server),
            service_names=[LLM],
            listen="0.0.0.0:0",
        ):
            pytest.fail("the server started")


async def test_an_unknown_method_is_unimplemented_not_a_crash(tmp_path):
    async with mesh(tmp_path) as (_, address), open_channel(address, caller="facade", state_dir=tmp_path) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/omniserve.llm.v1.LlmService/Nope")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
