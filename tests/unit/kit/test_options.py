from pathlib import Path

import pytest
from grpc._cython import cygrpc

from services.kit import channels


@pytest.mark.parametrize("name", sorted({name for name, _ in channels.OPTIONS}))
def test_every_channel_option_is_one_that_grpc_knows(name):
    """An unknown option is ignored in silence: a misspelt ping interval once cut every quiet stream after 30 s."""
    assert name.encode() in Path(cygrpc.__file__).read_bytes()
