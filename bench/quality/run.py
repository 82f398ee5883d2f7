"""Whether a server still answers as well as it did: graded checks against floors and a baseline file.

Exit status 1 when something is worse, 2 when the server does not answer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.processes import CHECKOUT
from bench.quality import media_suite, text_suite, vector_suite
from bench.quality.findings import Baseline, Finding, failures, from_json, to_json, updated
from bench.quality.server import Server, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SUITES: Final = ("llm", "embedding", "image", "audio")
BASELINE: Final = CHECKOUT / "build" / "bench" / "quality-baseline.json"

Check = tuple[str, "Callable[[Server], Finding | None]"]


def checks_of(suites: Sequence[str], baseline: Baseline) -> Iterator[Check]:
    """Yield the checks of some suites."""
    found: dict[str, Iterator[Check]] = {
        "llm": iter(text_suite.checks()),
        "embedding": iter(vector_suite.checks(baseline)),
        "image": media_suite.image_checks(),
        "audio": media_suite.audio_checks(),
    }
    for suite in suites:
        yield from found[suite]


def grade(server: Server, suites: Sequence[str], baseline: Baseline) -> list[Finding]:
    """Run the checks and print each. Raises ServerError."""
    found = []
    for name, check in checks_of(suites, baseline):
        finding = check(server)
        if finding is None:
            print(f"{name:<24} not configured", flush=True)
            continue
        former = baseline.scores.get(name)
        was = "" if former is None else f" (baseline {former:.3f})"
        print(f"{name:<24} {finding.score:.3f}{was}  {finding.detail}", flush=True)
        found.append(finding)
    return found


def read_baseline(path: Path) -> Baseline:
    """Return the baseline of a file, an empty one where there is none. Raises ValueError."""
    return from_json(json.loads(path.read_text())) if path.exists() else Baseline()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suites."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8791", help="address of the server")
    parser.add_argument("--suite", action="append", choices=SUITES, help="only this one; may be given again")
    parser.add_argument("--baseline", type=Path, default=BASELINE, help="file to compare with")
    parser.add_argument("--update-baseline", action="store_true", help="keep what is found as the baseline")
    parser.add_argument(
        "--force-local", action="store_true", help="name the server's own models, so that no proxy's alias answers"
    )
    options = parser.parse_args(argv)
    server = Server(options.url, api_key=os.environ.get("OMNISERVE_API_KEY", ""), force_local=options.force_local)
    try:
        baseline = read_baseline(options.baseline)
        findings = grade(server, options.suite or SUITES, baseline)
    except (ServerError, ValueError) as error:
        sys.stderr.write(f"quality: {error}\n")
        return 2
    finally:
        server.close()
    # An update sets aside what was before; floors hold all the same.
    wrong = failures(findings, Baseline() if options.update_baseline else baseline)
    for each in wrong:
        print(f"WORSE {each}")
    if options.update_baseline and not wrong:
        options.baseline.parent.mkdir(parents=True, exist_ok=True)
        options.baseline.write_text(json.dumps(to_json(updated(findings, baseline)), indent=1) + "\n")
        print(f"baseline written to {options.baseline}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
