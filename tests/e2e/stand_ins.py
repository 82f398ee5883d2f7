"""Stand-ins for what is behind the front door, for tests about the door alone: run as a script, in a process of its own.

Facade: echoes what reached it as JSON, streams until told to end, counts bodies. Services: the real kit, so service tokens,
audiences and reflection are the real ones, with servicers that answer who called.
"""
# ruff: noqa: N802 - servicers have the contracts' names

import argparse
import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import uvicorn

from omniserve.admission.v1 import admission_pb2, admission_pb2_grpc
from omniserve.llm.v1 import llm_pb2, llm_pb2_grpc
from services.kit.access import caller_of
from services.kit.server import running_server
from services.kit.settings import MeshSettings

BODY_LIMIT = 80 * 1024 * 1024


class StandInSettings(MeshSettings):
    service = "stand-in"


class Facade:
    def __init__(self):
        self.ending = asyncio.Event()

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/end-streams":
            self.ending.set()
            await answer(send, 200, {})
        elif scope["path"] == "/stream":
            await self.stream(send)
        else:
            await self.echo(scope, receive, send)

    async def echo(self, scope, receive, send):
        received, too_large = await count_body(receive)
        if too_large:
            await answer(send, 413, {"error": {"code": "too_large", "message": "counted by the facade"}})
            return
        await answer(
            send,
            200,
            {
                "path": scope["raw_path"].decode(),
                "query": scope["query_string"].decode(),
                "headers": [[name.decode(), value.decode()] for name, value in scope["headers"]],
                "received": received,
            },
        )

    async def stream(self, send):
        self.ending.clear()
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"data: first\n\n", "more_body": True})
        await self.ending.wait()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def count_body(receive):
    received = 0
    while True:
        message = await receive()
        received += len(message.get("body", b""))
        if received > BODY_LIMIT:
            return received, True
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return received, False


async def answer(send, status, value):
    body = json.dumps(value).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def who(context):
    caller = caller_of(context)
    return llm_pb2.Model(name=caller.service, aliases=[caller.client, caller.tier])


class Llm(llm_pb2_grpc.LlmServiceServicer):
    async def ListModels(self, request, context):
        return llm_pb2.ListModelsResponse(models=[who(context)])

    async def GetStatus(self, request, context):
        return llm_pb2.GetStatusResponse(draining=False)

    async def Chat(self, request, context):
        for text in ("one", "two"):
            yield llm_pb2.ChatResponse(output=llm_pb2.Output(choices=[llm_pb2.ChoiceDelta(text=text)]))
        yield llm_pb2.ChatResponse(done=llm_pb2.Done(model="stand-in"))


class LlmAdmin(llm_pb2_grpc.LlmAdminServiceServicer):
    async def LoadModel(self, request, context):
        return llm_pb2.LoadModelResponse(model=who(context))


class Admission(admission_pb2_grpc.AdmissionServiceServicer):
    async def GetStatus(self, request, context):
        return admission_pb2.GetStatusResponse(epoch=7)


def register_llm(server):
    llm_pb2_grpc.add_LlmServiceServicer_to_server(Llm(), server)
    llm_pb2_grpc.add_LlmAdminServiceServicer_to_server(LlmAdmin(), server)


def register_admission(server):
    admission_pb2_grpc.add_AdmissionServiceServicer_to_server(Admission(), server)


async def main():
    parser = argparse.ArgumentParser()
    for name in ("facade", "llm", "admission"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    ports = parser.parse_args()
    settings = StandInSettings(state_dir=ports.state_dir)
    async with AsyncExitStack() as stack:
        for name, port, register, services in (
            ("llm", ports.llm, register_llm, ("omniserve.llm.v1.LlmService", "omniserve.llm.v1.LlmAdminService")),
            ("admission", ports.admission, register_admission, ("omniserve.admission.v1.AdmissionService",)),
        ):
            running = running_server(
                name=name, settings=settings, listen=f"127.0.0.1:{port}", register=register, service_names=services
            )
            await stack.enter_async_context(running)
        await uvicorn.Server(uvicorn.Config(Facade(), port=ports.facade, log_level="warning", lifespan="off")).serve()


asyncio.run(main())
