"""Rules that every contract obeys and that buf lint does not know."""

import importlib
import re

import grpc

from omniserve.options.v1 import options_pb2
from services.kit.errors import STATUS

# Services that Envoy's native gRPC routes may name. Adding one opens a door to everybody: do it on purpose.
PUBLIC_SERVICES = {
    "omniserve.cutout.v1.CutoutService",
    "omniserve.diffusion.v1.DiffusionService",
    "omniserve.jobs.v1.JobsService",
    "omniserve.llm.v1.LlmService",
    "omniserve.speech.v1.SpeechService",
}
# Packages with types for others, and no service of their own.
SHARED_PACKAGES = {"omniserve.options.v1", "omniserve.media.v1"}
# Who may be named as a caller: everybody on DESIGN's map that holds a service token.
MESH_SERVICES = {
    "admission",
    "capacity",
    "cutout",
    "diffusion",
    "facade",
    "jobs",
    "ledger",
    "llm",
    "relay",
    "speech",
    "video",
    "vram",
}
# The one reason with two codes: a key that is taken, and a state that does not allow the call.
CODES_OF_REASON = {(code.name, str(reason)) for reason, code in STATUS.items()} | {("FAILED_PRECONDITION", "conflict")}
REASONS = {str(reason) for reason in STATUS}
CODE = re.compile(r"\b(" + "|".join(code.name for code in grpc.StatusCode) + r")\b")
ABBREVIATED_UNITS = re.compile(r"_(kb|mb|gb|sec|secs|msec|millis|min|mins|hr|hrs|percentage|pct)$")


def test_every_rpc_says_who_may_call_it(contracts):
    silent = [rpc.name for rpc in contracts.rpcs() if not rpc.declares_access or not rpc.access.audience]
    assert not silent


def test_only_mesh_rpcs_narrow_their_callers_and_only_to_services_that_exist(contracts):
    for rpc in contracts.rpcs():
        callers = set(rpc.access.callers)
        assert not callers or rpc.access.audience == options_pb2.AUDIENCE_MESH, rpc.name
        assert callers <= MESH_SERVICES, rpc.name


def test_every_rpc_comment_tells_effect_idempotency_and_status(contracts):
    for rpc in contracts.rpcs():
        words = rpc.comment.lower()
        missing = [word for word in ("effect", "idempotency", "status") if word not in words]
        assert not missing, f"{rpc.name} says nothing of {missing}"


def test_every_streaming_rpc_tells_what_streams(contracts):
    silent = [rpc.name for rpc in contracts.rpcs() if rpc.streams and "stream" not in rpc.comment.lower()]
    assert not silent


def test_every_reason_in_an_rpc_comment_is_one_of_the_kit_and_stands_behind_its_own_code(contracts):
    seen = 0
    for rpc in contracts.rpcs():
        for code, reason in _promised(rpc.comment):
            seen += 1
            assert (code, reason) in CODES_OF_REASON, f"{rpc.name} promises {code} {reason}"
    assert seen > 200


def test_the_reading_of_status_comments_finds_codes_and_reasons():
    comment = (
        "Status: INVALID_ARGUMENT invalid_request (`units` or so) | too_large; UNAVAILABLE draining | nonsense_word."
    )
    assert _promised(comment) == [
        ("INVALID_ARGUMENT", "invalid_request"),
        ("INVALID_ARGUMENT", "too_large"),
        ("UNAVAILABLE", "draining"),
        ("UNAVAILABLE", "nonsense_word"),
    ]


def test_every_package_equals_its_path(contracts):
    for file in contracts.files:
        package = file.package.split(".")
        assert file.name == "/".join([*package, f"{package[1]}.proto"])
        assert re.fullmatch(r"omniserve\.[a-z]+\.v[0-9]+", file.package)


def test_every_package_has_a_service_except_those_that_share_types(contracts):
    without = {file.package for file in contracts.files if not file.service}
    assert without == SHARED_PACKAGES


def test_every_enum_begins_with_unspecified_at_zero(contracts):
    for name, enum in contracts.enums():
        assert enum.value[0].number == 0, name
        assert enum.value[0].name.endswith("_UNSPECIFIED"), name


def test_no_field_abbreviates_its_unit(contracts):
    fields = [f"{name}.{field.name}" for name, message in contracts.messages() for field in message.field]
    # Rates keep the word of the key's setting: requests per minute.
    abbreviated = [field for field in fields if ABBREVIATED_UNITS.search(field) and not field.endswith("_per_min")]
    assert not abbreviated


def test_admin_services_are_for_the_operator(contracts):
    for rpc in contracts.rpcs():
        if rpc.service.endswith("AdminService"):
            assert rpc.access.audience == options_pb2.AUDIENCE_OPERATOR, rpc.name


def test_worker_and_store_services_are_for_named_services_of_the_mesh(contracts):
    inner = [rpc for rpc in contracts.rpcs() if rpc.service.endswith(("WorkerService", "StoreService"))]
    assert inner
    for rpc in inner:
        assert rpc.access.audience == options_pb2.AUDIENCE_MESH, rpc.name
        assert rpc.access.callers, rpc.name


def test_public_rpcs_are_in_the_services_that_envoy_may_route_to(contracts):
    public = {rpc.service for rpc in contracts.rpcs() if rpc.access.audience == options_pb2.AUDIENCE_PUBLIC}
    assert public == PUBLIC_SERVICES


def test_the_readme_names_every_service_and_no_other(contracts, root):
    named = set(re.findall(r"^\| `(omniserve\.[\w.]+)` \|", (root / "protos/README.md").read_text(), re.MULTILINE))
    assert named == {f"{file.package}.{service.name}" for file in contracts.files for service in file.service}


def test_the_stubs_in_use_are_those_of_the_contracts(contracts):
    for file in contracts.files:
        stub = importlib.import_module(file.name.removesuffix(".proto").replace("/", ".") + "_pb2")
        made = {name: [m.name for m in s.methods] for name, s in stub.DESCRIPTOR.services_by_name.items()}
        assert made == {s.name: [m.name for m in s.method] for s in file.service}, f"{file.name}: run `make protos`"
        for message in file.message_type:
            fields = {field.name: field.number for field in stub.DESCRIPTOR.message_types_by_name[message.name].fields}
            assert fields == {field.name: field.number for field in message.field}, f"{file.name}: run `make protos`"


def _promised(comment: str) -> list[tuple[str, str]]:
    """The (code, reason) pairs of an RPC comment: after each code, reasons joined by |, remarks in brackets left out."""
    promised = []
    plain = re.sub(r"\([^()]*\)", "", re.sub(r"`[^`]*`", "", comment))
    parts = CODE.split(" ".join(plain.split()))
    for code, rest in zip(parts[1::2], parts[2::2], strict=True):
        clause = re.split(r"[;.,]", rest, maxsplit=1)[0]
        alternatives = [alternative.strip() for alternative in clause.split("|")]
        words = [word for word in alternatives if re.fullmatch(r"[a-z_]+", word)]
        promised += [(code, word) for word in words if word in REASONS or "_" in word]
    return promised
