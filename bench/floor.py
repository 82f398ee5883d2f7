"""What bare gRPC servers that our own are compared with have in common."""

from typing import Final

OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    # The channels that both sides are called through ping every 10 s, which gRPC's own server takes for abuse by default.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
