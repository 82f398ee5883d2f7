"""Envoy's gauges of what runs behind the gate, read through its operator listener."""

import http.client
import json
import re
from collections import Counter
from typing import Final
from urllib.parse import quote

from services.admission.core.remains import Running

TIMEOUT_S: Final = 1.0
_FILTER: Final = r"^cluster\..*\.local\.e[01]\.upstream_rq_(pending_)?active$"
_TARGET: Final = f"/admin/envoy/stats?format=json&type=Gauges&filter={quote(_FILTER)}"
_NAME: Final = re.compile(r"cluster\.(.*)\.local\.(e[01])\.upstream_rq_(?:pending_)?active")


class GaugesError(Exception):
    """The gauges cannot be read; the message says why. `is_gone`: nobody listens there, so Envoy does not run."""

    def __init__(self, message: str, *, is_gone: bool = False) -> None:
        super().__init__(message)
        self.is_gone = is_gone


def read(address: str) -> Running:
    """Return how many exchanges run. The operator listener asks nobody for a token there. Blocks for TIMEOUT_S at most. Raises GaugesError."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=TIMEOUT_S)
    try:
        connection.request("GET", _TARGET, headers={"Host": "localhost"})
        response = connection.getresponse()
        text = response.read()
    except (OSError, http.client.HTTPException) as error:
        is_gone = isinstance(error, ConnectionRefusedError)
        raise GaugesError(f"{address} does not tell Envoy's gauges: {error!r}", is_gone=is_gone) from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise GaugesError(f"{address} answers {response.status} instead of Envoy's gauges")
    return parse(text)


def parse(text: bytes) -> Running:
    """Return what Envoy's stats say. Raises GaugesError."""
    sides: dict[str, Counter[str]] = {"e0": Counter(), "e1": Counter()}
    try:
        for stat in json.loads(text)["stats"]:
            found = _NAME.fullmatch(stat.get("name", ""))
            if found:
                sides[found[2]][found[1]] += int(stat["value"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GaugesError(f"these are no gauges of Envoy: {error!r}") from error
    return Running(sides["e0"], sides["e1"])
