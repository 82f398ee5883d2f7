"""A container's health check: `python -m deploy.probe grpc HOST:PORT` or `python -m deploy.probe http HOST:PORT PATH`.

Exits 0 when the server says it can do its work, 1 when it does not or does not answer.
"""

import argparse
import sys
from collections.abc import Sequence

from deploy.readiness import grpc_probe, http_probe


def main(arguments: Sequence[str] | None = None) -> int:
    """Probe once; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.probe", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("grpc").add_argument("address")
    http = kinds.add_parser("http")
    http.add_argument("address")
    http.add_argument("path")
    chosen = parser.parse_args(arguments)
    probe = grpc_probe(chosen.address) if chosen.kind == "grpc" else http_probe(chosen.address, chosen.path)
    return 0 if probe() else 1


if __name__ == "__main__":
    sys.exit(main())
