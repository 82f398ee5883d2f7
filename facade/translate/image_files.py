"""Signed URLs of pictures: their query, and the headers of the answer."""

from collections.abc import Iterable
from typing import Final

from facade.translate.fields import Integer, Text
from facade.translate.query import read_query
from facade.translate.record import Field, Record, record
from omniserve.jobs.v1 import jobs_pb2 as pb

FILE_QUERY: Final[Record] = record(
    [
        Field("expires", Integer(0, 2**53), "As the URL has it.", required=True),
        Field("signature", Text(1, 128), "As the URL has it.", required=True),
    ]
)


def read_file_query(image_id: str, query: Iterable[tuple[str, str]]) -> pb.ReadSignedImageRequest:
    """Read a signed URL; DomainError invalid_request names the parameter at fault."""
    values = read_query(FILE_QUERY, query)
    return pb.ReadSignedImageRequest(
        image_id=image_id, expires_unix_ms=values["expires"], signature=values["signature"]
    )


def file_headers(head: pb.MediaHead) -> list[tuple[bytes, bytes]]:
    """Return the headers of a file. It never changes, and is one caller's."""
    return [
        (b"content-type", head.mime_type.encode()),
        (b"content-length", str(head.length_bytes).encode()),
        (b"etag", f'"{head.sha256}"'.encode()),
        (b"cache-control", b"private, max-age=300, immutable"),
        (b"x-content-type-options", b"nosniff"),
    ]
