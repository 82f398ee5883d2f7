"""`omniserve models load | unload | swap`: through the operator's front door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cli import http
from cli.models.listing import SERVED_HEADER, served_row
from cli.terminal import print_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cli.settings import CliSettings


def run(url: str, settings: CliSettings, order: str, body: Mapping[str, Any]) -> None:
    """Give an order (load, unload or swap), wait until it is carried out, and print the model. Raises CliError."""
    key = settings.api_key.get_secret_value()
    headers = {"Authorization": f"Bearer {key}"} if key else None
    given = {name: value for name, value in body.items() if value is not None}
    with http.new_client(connect_s=settings.connect_timeout_s, read_s=None, headers=headers) as client:
        model = http.post_object(client, f"{url}/admin/llm/{order}", given)
    print_table(SERVED_HEADER, [served_row(model)])
