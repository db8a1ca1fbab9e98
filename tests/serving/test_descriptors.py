"""The shares of a process's descriptors."""

import resource
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from serving.http_acceptor import connection_caps, internal_connections, num_open_descriptors


@given(st.integers(1, 10**5), st.integers(256, 2**17), st.integers(0, 128))
def test_clients_leave_descriptors_for_the_service_itself(
    max_connections: int, limit: int, num_open: int
) -> None:
    """P2: however many clients come, workers and operators find a descriptor."""
    caps = connection_caps(max_connections, limit, num_open)
    assert 1 <= caps.grpc <= max(8, max_connections)
    assert 1 <= caps.http <= max(8, max_connections)
    assert num_open + caps.http + 3 * caps.grpc + 40 <= limit
    assert caps.internal >= 32
    assert num_open + caps.http + 3 * caps.grpc + caps.internal + 8 <= limit


@given(st.integers(256, 2**17), st.integers(0, 128))
def test_strangers_on_an_internal_port_leave_descriptors_too(limit: int, num_open: int) -> None:
    """H7: nothing bounded the connections of internal gRPC."""
    assert 32 <= internal_connections(limit, num_open) <= limit - num_open - 32


@given(st.integers(1, 10**5), st.integers(256, 2**17), st.integers(0, 128), st.integers(0, 3000))
def test_files_have_descriptors_of_their_own(
    max_connections: int, limit: int, num_open: int, num_files: int
) -> None:
    """P2: a client that is sent a file, or sends one, takes two; batches have theirs open all the time."""
    caps = connection_caps(max_connections, limit, num_open, num_files)
    assert caps.http >= 1 <= caps.grpc
    clients = 2 * caps.http + 3 * caps.grpc
    assert num_open + min(num_files, 16) + clients + 32 <= limit
    assert num_open + clients + caps.internal <= limit


def test_a_low_limit_is_said_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """P2: an operator reads why there are fewer connections than were asked for."""
    caps = connection_caps(8192, 256, 40)
    assert (caps.http, caps.grpc) == (114, 12)
    assert "max_connections is 8192" in caplog.text
    assert connection_caps(100, 2**16, 40).http == 100


def test_the_soft_limit_is_raised_at_the_start() -> None:
    """H7: the common soft limit of 1,024 is not what bounds a service."""
    program = (
        "import resource; from serving.http_acceptor import raise_descriptor_limit as lift;"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard));"
        "print(lift(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    lifted, soft, hard = map(int, out.stdout.split())
    assert hard == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert lifted == soft == min(hard, 2**17)


def test_open_descriptors_are_counted() -> None:
    """P2: the count grows with what is open."""
    before = num_open_descriptors()
    with Path("/dev/null").open():
        assert num_open_descriptors() == before + 1
