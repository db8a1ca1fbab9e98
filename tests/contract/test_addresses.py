"""Addresses as text, and that only one module makes them."""

import ast
import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.addresses import (
    check_address,
    check_listen_address,
    is_loopback,
    join_address,
    local_address,
    split_address,
)

ROOT = Path(__file__).parents[2]
PRODUCT = (
    "autoscaler",
    "cli",
    "contract",
    "decode_service",
    "engine",
    "kv_transfer",
    "kvbaton",
    "launch",
    "prefill_service",
    "roles",
    "router",
    "serving",
    "text",
    "wire",
    "worker",
)
HOSTS = st.one_of(st.ip_addresses().map(str), st.from_regex(r"[a-z][a-z0-9-]{0,20}", fullmatch=True))
PORTS = st.integers(0, 65535)


@given(host=HOSTS, port=PORTS)
def test_an_address_comes_apart_as_it_was_put_together(host: str, port: int) -> None:
    address = join_address(host, port)
    assert split_address(address) == (host, port)
    assert check_listen_address(address) == check_address(address) == address


@given(address=st.ip_addresses(v=6), port=PORTS)
def test_an_ipv6_host_stands_in_brackets_with_or_without_those_of_the_user(
    address: ipaddress.IPv6Address, port: int
) -> None:
    shown = f"[{address}]:{port}"
    assert check_listen_address(f"{address}:{port}") == check_listen_address(shown) == shown
    assert join_address(str(address), port) == shown


def test_an_empty_host_stands_for_all_addresses_of_a_server_only() -> None:
    assert check_listen_address(":8000") == check_listen_address("[]:8000") == "[::]:8000"
    assert not is_loopback("[::]:8000")
    with pytest.raises(ValueError, match="names no host"):
        check_address(":8000")


@pytest.mark.parametrize(
    "address", ["", "8000", "host", "host:", "host:65536", "host:-1", "host:1x", "host:٣", "[::1]"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    for check in (check_address, check_listen_address):
        with pytest.raises(ValueError, match="is not HOST:PORT"):
            check(address)


@pytest.mark.parametrize(
    ("listened", "local"),
    [
        ("0.0.0.0:80", "127.0.0.1:80"),
        ("[::]:80", "127.0.0.1:80"),
        ("[::1]:80", "[::1]:80"),
        ("127.0.0.1:80", "127.0.0.1:80"),
        ("example.com:80", "example.com:80"),
    ],
)
def test_a_server_on_all_addresses_is_reached_on_this_machine(listened: str, local: str) -> None:
    assert local_address(listened) == local


HOST_WORDS = re.compile(r"host|addr|(^|_)ip(_|$)|server_name", re.IGNORECASE)
PORT_WORD = re.compile(r"port(?!ed|able)", re.IGNORECASE)


def made_by_hand(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of expressions that put a host and a port together."""
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=values):
                for at, colon in enumerate(values):
                    if (
                        _is_colon(colon)
                        and at > 0
                        and _puts_together(values[at - 1], values[at + 1 : at + 2])
                    ):
                        yield node.lineno
            case ast.BinOp(op=ast.Add(), left=ast.BinOp(left=host, right=ast.Constant(value=":"))) if _names(
                host, HOST_WORDS
            ):
                yield node.lineno
            case ast.Constant(value="%s:%d" | "{}:{}" | "[%s]:%d" | "[{}]:{}"):
                yield node.lineno
            case ast.Call(
                func=ast.Attribute(value=ast.Constant(value=":"), attr="join"), args=[argument]
            ) if _names(argument, HOST_WORDS):
                yield node.lineno


def _is_colon(part: ast.expr) -> bool:
    return isinstance(part, ast.Constant) and re.match(r"\]?:(\d|$)", str(part.value)) is not None


def _puts_together(before: ast.expr, after: list[ast.expr]) -> bool:
    return _names(before, HOST_WORDS) or any(_names(part, PORT_WORD) for part in after)


def _names(part: ast.AST, words: re.Pattern[str]) -> bool:
    found = (node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") for node in ast.walk(part))
    return any(words.search(name) for name in found if name)


def test_no_other_module_makes_an_address() -> None:
    """An f-string of a host and a port is right for IPv4 only."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in PRODUCT
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.relative_to(ROOT) != Path("contract/addresses.py")
        for line in made_by_hand(ast.parse(path.read_text()))
    ]
    assert found == [], "use contract.addresses.join_address"


@pytest.mark.parametrize(
    "code",
    [
        'f"{host}:{port}"',
        'f"http://{self.host}:{self.port}/v1"',
        'f"{settings.host}:8000"',
        'f"[{host}]:{port}"',
        'f"{peer[0]}:{port + 1}"',
        'f"{name}:{sock.port}"',
        'host + ":" + str(port)',
        '"%s:%d" % (host, port)',
        '"{}:{}".format(host, port)',
        '":".join([host, str(port)])',
    ],
)
def test_the_check_finds_an_address_that_is_made_by_hand(code: str) -> None:
    assert list(made_by_hand(ast.parse(code))) != []


@pytest.mark.parametrize("code", ['f"{path}:{line}"', 'f"{address}: cannot listen"', 'f"127.0.0.1:{number}"'])
def test_the_check_leaves_other_colons_alone(code: str) -> None:
    assert list(made_by_hand(ast.parse(code))) == []
