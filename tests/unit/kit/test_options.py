from pathlib import Path

import pytest
from grpc._cython import cygrpc

from services.kit import channels, server


@pytest.mark.parametrize("name", sorted({name for name, _ in (*channels.OPTIONS, *server.OPTIONS)}))
def test_every_channel_option_is_one_that_grpc_knows(name):
    """An unknown option is ignored in silence: a misspelt ping interval once cut every quiet stream after 30 s."""
    assert name.encode() in Path(cygrpc.__file__).read_bytes()


def test_servers_accept_the_pings_that_our_channels_send():
    sent = dict(channels.OPTIONS)["grpc.keepalive_time_ms"]
    accepted = dict(server.OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"]
    assert accepted < sent
