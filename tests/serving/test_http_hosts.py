"""Host names of a server: pages that rebind their own name to this machine are refused."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from serving.http_hosts import HostCheck, listed_hosts


@pytest.mark.parametrize(
    ("address", "configured", "header", "is_admitted"),
    [
        ("127.0.0.1:8000", "", "127.0.0.1:8000", True),
        ("127.0.0.1:8000", "", "localhost", True),
        ("127.0.0.1:8000", "", "LOCALHOST.:80", True),
        ("127.0.0.1:8000", "", "[::1]:8000", True),
        ("127.0.0.1:8000", "", None, True),
        ("127.0.0.1:8000", "", "evil.example", False),
        ("127.0.0.1:8000", "", "127.0.0.1.evil.example", False),
        ("127.0.0.1:8000", "", "localhost@evil.example", False),
        ("127.0.0.1:8000", "", "localhost:80/evil", False),
        ("127.0.0.1:8000", "", "", False),
        ("127.0.0.1:8000", "", "10.0.0.1", False),
        ("127.0.0.1:8000", "api.example", "api.example:443", True),
        ("127.0.0.1:8000", "api.example", "evil.example", False),
        ("127.0.0.1:8000", "*", "evil.example", True),
        ("0.0.0.0:8000", "", "anything.example", True),
        ("0.0.0.0:8000", "api.example", "evil.example", False),
        ("0.0.0.0:8000", "api.example", "10.0.0.1:8000", True),
        ("[::1]:8000", "", "evil.example", False),
    ],
)
def test_names(address: str, configured: str, header: str | None, is_admitted: bool) -> None:
    """M9: on a loopback address its own names and the configured ones are valid."""
    assert HostCheck(address, listed_hosts(configured)).admits(header) is is_admitted


@given(st.text(max_size=40))
def test_no_header_is_taken_for_a_name_that_it_is_not(header: str) -> None:
    """M9: a valid name denotes this machine in any spelling."""
    if HostCheck("127.0.0.1:8000").admits(header):
        name = header.lower().rpartition(":")[0] if header.lower().rpartition(":")[1] else header.lower()
        assert name.strip("[]").rstrip(".") in ("localhost", "127.0.0.1", "::1", "")
