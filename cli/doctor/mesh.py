"""Judges what belongs to this mesh: settings, model, state directory, tokens, ports, the trace collector. Pure."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cli.doctor.report import Finding, fail, ok, warn
from cli.terminal import human_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cli.models.gguf import GgufHeader

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def check_environment(set_variables: int, problems: Sequence[str]) -> list[Finding]:
    """Judge the OMNISERVE_ variables; `problems` are kit's sentences."""
    if problems:
        return [
            fail("settings", problem, "correct or unset it; docs/settings.md has every name") for problem in problems
        ]
    return [ok("settings", f"{set_variables} OMNISERVE_ variables set, all known" if set_variables else "all defaults")]


def check_model(path: str, header: GgufHeader | None, error: str) -> Finding:
    """Judge the default model's file; `error` says why there is no header."""
    if header is None:
        return fail(
            "model",
            f"{path}: {error}",
            "`omniserve models pull owner/name:QUANT`, then set OMNISERVE_LLM_GGUF to the file",
        )
    what = " ".join(part for part in (header.name or header.architecture, header.quantisation) if part)
    return ok("model", f"{what}, {human_size(header.size_bytes)} ({path})")


@dataclass(frozen=True)
class PathSeen:
    """A file or folder. `mode` are its permission bits, `mine`: it belongs to the user who runs this command."""

    path: str
    mode: int
    mine: bool
    writable: bool = True
    valid: bool = True


def check_state_dir(seen: PathSeen | None, path: str, *, can_make: bool) -> Finding:
    """Judge the state directory; `seen` is None while there is none."""
    if seen is None:
        if can_make:
            return ok("state", f"{path} is made at the first start")
        return fail("state", f"{path} cannot be made", "set OMNISERVE_STATE_DIR to a folder you can write")
    if not seen.writable:
        return fail("state", f"{path} cannot be written", f"chown -R $(id -u) {path}, or set OMNISERVE_STATE_DIR")
    if seen.mode & stat.S_IWOTH:
        return fail("state", f"everybody on this machine can write {path}", f"chmod o-w {path}")
    return ok("state", path)


def check_tokens(folder: PathSeen | None, tokens: Sequence[PathSeen]) -> list[Finding]:
    """Judge the service tokens: whoever reads one can speak as that service."""
    if folder is None:
        return [ok("tokens", "made at the first start")]
    findings = []
    if folder.mode & _OTHERS:
        findings.append(
            fail("tokens", f"others can look into {folder.path} (mode {folder.mode:o})", f"chmod 700 {folder.path}")
        )
    for token in tokens:
        if token.mode & _OTHERS:
            findings.append(
                fail(
                    "tokens",
                    f"others can read {token.path} (mode {token.mode:o})",
                    f"rm {token.path}, and restart: it is known",
                )
            )
        elif not token.mine:
            findings.append(fail("tokens", f"{token.path} belongs to another user", f"chown $(id -u) {token.path}"))
        elif not token.valid:
            findings.append(fail("tokens", f"{token.path} holds no token", f"rm {token.path}, and restart"))
    return findings or [ok("tokens", f"{len(tokens)} services, readable by their owner only")]


@dataclass(frozen=True)
class PortSeen:
    """An address the mesh listens on and who has it. `holder`: "" when free; `ours`: by a process of this mesh."""

    service: str
    port: int
    variable: str
    holder: str = ""
    ours: bool = False
    refused: str = ""


def check_ports(ports: Sequence[PortSeen]) -> list[Finding]:
    """Judge the ports: each is free, or used by this mesh."""
    findings = []
    for seen in ports:
        if seen.refused:
            findings.append(
                fail("ports", f"{seen.port} ({seen.service}) cannot be bound: {seen.refused}", f"see {seen.variable}")
            )
        elif seen.holder and not seen.ours:
            findings.append(
                fail(
                    "ports",
                    f"{seen.port} ({seen.service}) is in use by {seen.holder}",
                    f"stop it, or choose another port with {seen.variable}",
                )
            )
    twice = _asked_twice(ports)
    findings += [
        fail("ports", f"{port} is asked for twice: {' and '.join(names)}", "change one of them")
        for port, names in twice
    ]
    free = [str(seen.port) for seen in ports if not seen.holder and not seen.refused]
    used = [str(seen.port) for seen in ports if seen.ours]
    if not findings:
        parts = [f"free: {', '.join(free)}"] if free else []
        parts += [f"in use by this mesh: {', '.join(used)}"] if used else []
        findings.append(ok("ports", "; ".join(parts)))
    return findings


def _asked_twice(ports: Sequence[PortSeen]) -> list[tuple[int, list[str]]]:
    by_port: dict[int, list[str]] = {}
    for seen in ports:
        by_port.setdefault(seen.port, []).append(seen.variable)
    return [(port, names) for port, names in by_port.items() if len(names) > 1]


def check_collector(endpoint: str, error: str | None) -> Finding:
    """Judge the trace collector; `error` is why it cannot be reached. The mesh works without it."""
    if not endpoint:
        return ok("traces", "off; OTEL_EXPORTER_OTLP_ENDPOINT turns them on")
    if error:
        return warn(
            "traces",
            f"nothing takes them at {endpoint}: {error}",
            "start the collector, or unset OTEL_EXPORTER_OTLP_ENDPOINT",
        )
    return ok("traces", f"sent to {endpoint}")
