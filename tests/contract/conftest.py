"""What the contract tests look at: the contracts as buf reads them, with their comments."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

from omniserve.options.v1 import options_pb2

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).parent / "buf"

# Paths into SourceCodeInfo: field numbers of FileDescriptorProto.service and ServiceDescriptorProto.method.
_SERVICE, _METHOD = 6, 2


@dataclass(frozen=True)
class Rpc:
    """One RPC with what its contract says about it."""

    file: str
    service: str
    method: MethodDescriptorProto
    comment: str

    @property
    def name(self) -> str:
        return f"{self.service}/{self.method.name}"

    @property
    def access(self) -> options_pb2.Access:
        return self.method.options.Extensions[options_pb2.access]

    @property
    def declares_access(self) -> bool:
        return self.method.options.HasExtension(options_pb2.access)

    @property
    def streams(self) -> bool:
        return self.method.client_streaming or self.method.server_streaming


class Contracts:
    """All files below protos/omniserve."""

    def __init__(self, files: FileDescriptorSet) -> None:
        self.files = [file for file in files.file if file.name.startswith("omniserve/")]

    def rpcs(self) -> Iterator[Rpc]:
        for file in self.files:
            comments = {tuple(location.path): location.leading_comments for location in file.source_code_info.location}
            for s, service in enumerate(file.service):
                for m, method in enumerate(service.method):
                    comment = comments.get((_SERVICE, s, _METHOD, m), "")
                    yield Rpc(file.name, f"{file.package}.{service.name}", method, comment)

    def messages(self) -> Iterator[tuple[str, DescriptorProto]]:
        for file in self.files:
            for message in file.message_type:
                yield from _nested(f"{file.package}.{message.name}", message)

    def enums(self) -> Iterator[tuple[str, EnumDescriptorProto]]:
        for file in self.files:
            for enum in file.enum_type:
                yield f"{file.package}.{enum.name}", enum
        for name, message in self.messages():
            for enum in message.enum_type:
                yield f"{name}.{enum.name}", enum


def _nested(name: str, message: DescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
    yield name, message
    for child in message.nested_type:
        yield from _nested(f"{name}.{child.name}", child)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def buf():
    """Run buf in a folder that has a buf.yaml; returns the finished process."""

    def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        return subprocess.run([BUF, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.fixture(scope="session")
def contracts(buf, tmp_path_factory: pytest.TempPathFactory) -> Contracts:
    image = tmp_path_factory.mktemp("contracts") / "image.binpb"
    built = buf("build", "-o", str(image))
    assert built.returncode == 0, built.stdout + built.stderr
    return Contracts(FileDescriptorSet.FromString(image.read_bytes()))


@pytest.fixture(scope="session")
def baseline() -> Contracts:
    return Contracts(FileDescriptorSet.FromString((ROOT / "protos/baseline.binpb").read_bytes()))
