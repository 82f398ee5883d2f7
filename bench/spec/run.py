"""Whether drafts pay: the mesh with speculation against the same mesh, same prompts and same moment, without it."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.llm.load import LoadProcess
from bench.llm.mesh import Mesh, start_mesh
from bench.llm.rounds import BenchError
from bench.llm.sides import add_shape, chat_body, shape_of
from bench.measure import abba, ratio
from bench.processes import stop_children_on_signal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIMIT_S = 300.0
_CODE = "\n".join(f"    total += price[{item}] * amount[{item}]  # position {item}" for item in range(8))
# What is asked of a model decides how much of its answer stood in the text before.
PROMPTS: Mapping[str, Sequence[str]] = {
    "copying": (
        f"Repeat this code with the name total replaced by sum:\n{_CODE}",
        "Repeat this list three times: copper, silver, gold, iron, tin, lead, zinc, nickel, cobalt, chromium.",
    ),
    "open-ended": (
        "Tell a story about a lighthouse keeper who finds a letter.",
        "Explain to a child why the sky is blue and sunsets are red.",
    ),
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One burst: how fast, and what became of the drafts. `draft_calls`: decode calls of the draft model."""

    tokens_per_s: float
    tokens: int
    steps: int
    drafted: int
    accepted: int
    calls_saved: int
    draft_calls: int


def sources(draft: int, draft_gguf: Path | None) -> Mapping[str, Mapping[str, str]]:
    """Return what may propose, with the settings for it."""
    most = {"OMNISERVE_LLM_SPEC_DRAFT": str(draft)}
    found = {"lookup": most}
    if draft_gguf is not None:
        model = {**most, "OMNISERVE_LLM_SPEC_DRAFT_GGUF": str(draft_gguf)}
        found["model"] = {**model, "OMNISERVE_LLM_SPEC_LOOKUP": "0"}
        found["both"] = model
    return found


def measure(load: LoadProcess, mesh: Mesh, prompts: Sequence[str], *, tokens: int, speculate: bool) -> Arm:
    """Run one burst. Raises BenchError when an answer is not what was asked for."""
    bodies = [chat_body(prompt, tokens, speculate=speculate) for prompt in prompts]
    before = mesh.engine()
    result = load.burst(port=mesh.port, path="/v1/chat/completions", bodies=bodies, limit_s=LIMIT_S)
    if complaint := result.complaint(tokens):
        raise BenchError(complaint)
    after = mesh.engine()
    was, now = before.speculation, after.speculation
    return Arm(
        tokens_per_s=result.tokens / result.seconds,
        tokens=result.tokens,
        steps=after.steps_total - before.steps_total,
        drafted=now.drafted_total - was.drafted_total,
        accepted=now.accepted_total - was.accepted_total,
        calls_saved=now.calls_saved_total - was.calls_saved_total,
        draft_calls=now.draft_calls_total - was.draft_calls_total,
    )


def report(source: str, kind: str, with_drafts: Sequence[Arm], without: Sequence[Arm]) -> str:
    """Return the line of one source and one kind of prompt."""
    speed = ratio([arm.tokens_per_s for arm in with_drafts], [arm.tokens_per_s for arm in without])
    steps = ratio([float(arm.steps) for arm in with_drafts], [float(arm.steps) for arm in without])
    drafted, accepted = sum(arm.drafted for arm in with_drafts), sum(arm.accepted for arm in with_drafts)
    tokens = sum(arm.tokens for arm in with_drafts)
    saved, spent = sum(arm.calls_saved for arm in with_drafts), sum(arm.draft_calls for arm in with_drafts)
    return (
        f"{source:<7} {kind:<12} tokens/s with over without {speed.show(2)}; steps {steps.show(2)}; "
        f"drafted {drafted}, accepted {accepted} ({accepted / max(drafted, 1):.0%}); "
        f"calls saved {saved} for {tokens} tokens, {spent} smaller ones spent on drafts"
    )


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    print(
        f"drafts of at most {options.draft} tokens; {options.slots} slots, {options.threads} threads, {options.gguf.name}, "
        f"draft model {options.draft_gguf.name if options.draft_gguf is not None else 'none'}, "
        f"{options.tokens} tokens a stream, {options.rounds} rounds, greedy, one stream at a time",
        flush=True,
    )
    for source, settings in sources(options.draft, options.draft_gguf).items():
        _measure_source(source, settings, options)


def _measure_source(source: str, settings: Mapping[str, str], options: argparse.Namespace) -> None:
    shape = shape_of(options)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omniserve-bench-")))
        mesh = stack.enter_context(start_mesh(shape, environ={**os.environ, **settings}, folder=folder))
        load = stack.enter_context(LoadProcess())
        for kind, prompts in PROMPTS.items():
            arms: tuple[list[Arm], list[Arm]] = ([], [])
            for round_index in range(options.rounds):
                prompt = prompts[round_index % len(prompts)]
                for which in abba(round_index):
                    arms[which].append(measure(load, mesh, [prompt], tokens=options.tokens, speculate=which == 0))
            print(report(source, kind, *arms), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_shape(parser)
    parser.add_argument(
        "--draft-gguf", type=Path, help="small model of the same vocabulary; measured by itself and beside the text"
    )
    parser.add_argument("--draft", type=int, default=8, help="most tokens of a draft")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of every stream")
    parser.add_argument("--rounds", type=int, default=4, help="interleaved rounds per kind of prompt")
    stop_children_on_signal()
    run(parser.parse_args(argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
