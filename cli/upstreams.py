"""`omniserve upstreams`: where requests are proxied to, and how that goes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import grpc
from google.protobuf.json_format import MessageToDict

from cli.errors import CliError, Exit
from cli.http import START_HINT
from cli.terminal import note, one_line, print_table
from omniserve.admission.v1 import admission_pb2
from omniserve.relay.v1 import relay_pb2, relay_pb2_grpc

if TYPE_CHECKING:
    from cli.settings import CliSettings

HEADER: Final = ("UPSTREAM", "GROUP", "ENDPOINT", "HEALTH", "TIERS", "ACTIVE", "REQUESTS", "REUSED", "FAILED", "LEFT")
_LIMIT_S: Final = 10.0


def run(url: str, settings: CliSettings, *, as_json: bool) -> Exit:
    """Show the upstreams as relay knows them, through the operator's front door. Returns 1 when something is wrong."""
    listed, status = _ask(url, settings)
    if as_json:
        print(json.dumps(MessageToDict(listed) | {"status": MessageToDict(status)}, indent=2))
    elif listed.upstreams:
        print_table(HEADER, rows(listed, status))
    else:
        print("nothing is proxied: set OMNISERVE_<MODALITY>_UPSTREAM, or `upstreams` in omniserve.yaml")
    problems = [_problem(each) for each in status.problems]
    if not status.envoy_reachable:
        problems.append("Envoy's counters cannot be read, so health and numbers are not known")
    for problem in problems:
        note(f"omniserve: {problem}")
    return Exit.FAILED if problems else Exit.OK


def _ask(url: str, settings: CliSettings) -> tuple[relay_pb2.ListUpstreamsResponse, relay_pb2.GetStatusResponse]:
    key = settings.api_key.get_secret_value()
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    with grpc.insecure_channel(urlsplit(url).netloc) as channel:
        relay = relay_pb2_grpc.RelayServiceStub(channel)
        try:
            listed = relay.ListUpstreams(relay_pb2.ListUpstreamsRequest(), timeout=_LIMIT_S, metadata=metadata)
            return listed, relay.GetStatus(relay_pb2.GetStatusRequest(), timeout=_LIMIT_S, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                said = one_line(error.details() or "")
                raise CliError(f"relay does not answer at {url}: {said}. {START_HINT}") from error
            raise CliError(one_line(f"{error.code().name.lower()}: {error.details()}")) from error


def rows(listed: relay_pb2.ListUpstreamsResponse, status: relay_pb2.GetStatusResponse) -> list[tuple[str, ...]]:
    """Return a line for each endpoint; the counters are the upstream's and stand in its first line."""
    counts = {each.name: each for each in status.upstreams}
    found: list[tuple[str, ...]] = []
    for upstream in listed.upstreams:
        numbers = _numbers(counts.get(upstream.name, relay_pb2.UpstreamStatus()))
        name = upstream.name
        for group in upstream.groups:
            for endpoint in group.endpoints:
                found.append((name, _kind(group.kind), *_endpoint(endpoint, group), *numbers))
                name, numbers = "", ("",) * len(numbers)
    return found


def _endpoint(endpoint: relay_pb2.Endpoint, group: relay_pb2.EndpointGroup) -> tuple[str, ...]:
    address = one_line(f"{endpoint.address}{endpoint.path_prefix}")
    if endpoint.origin == relay_pb2.ENDPOINT_ORIGIN_LIVE:
        address = f"{address} (live)"
    health = relay_pb2.EndpointHealth.Name(endpoint.health).removeprefix("ENDPOINT_HEALTH_").lower()
    tiers = [admission_pb2.Tier.Name(each).removeprefix("TIER_").lower() for each in group.tiers]
    return address, health.replace("unspecified", "?"), ",".join(tiers) or "all", str(endpoint.active_requests)


def _numbers(counts: relay_pb2.UpstreamStatus) -> tuple[str, ...]:
    """Return requests, reused connections, what failed, and what left for another group, by cause."""
    failed = counts.connect_failures_total + counts.timeouts_total + counts.responses_total.get("5xx", 0)
    left = " ".join(f"{cause}={number}" for cause, number in sorted(counts.overflow_total.items()) if number)
    return str(counts.requests_total), str(counts.reused_total), str(failed), left or "0"


def _kind(number: relay_pb2.GroupKind.ValueType) -> str:
    return relay_pb2.GroupKind.Name(number).removeprefix("GROUP_KIND_").lower()


def _problem(problem: relay_pb2.Problem) -> str:
    where = f"{problem.file}:{problem.line}: " if problem.HasField("line") else ""
    setting = f"{problem.setting}: " if problem.setting else ""
    return one_line(f"settings refused: {where}{setting}{problem.message}")
