"""What the client's tests share with those of the mesh."""

import pytest

from tests import conftest


@pytest.fixture
def free_ports():
    """Return `free_ports(count)`."""
    return conftest.free_ports
