"""Addresses as text, "host:port" or "unix:/path". Only this module takes them apart or puts them together.

An IPv6 host needs brackets.
"""

import ipaddress

ALL = "::"
"""The host of a server that listens on all addresses of this machine, of both families."""
_WILDCARDS = frozenset({ALL, "0.0.0.0"})
_MAX_PORT = 65535
_UNIX = "unix:"
# Linux's ``sun_path`` has 108 bytes, with a zero at the end.
_MAX_PATH_BYTES = 107


def check_listen_address(value: str) -> str:
    """Return an address to listen on, with an IPv6 host in brackets; an empty host stands for ``ALL``.

    Raises ValueError if it is none.
    """
    host, colon, port = value.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > _MAX_PORT:
        raise ValueError(f"{value!r} is not HOST:PORT (port 0..{_MAX_PORT}; 0 picks a free one)")
    return join_address(host.strip("[]") or ALL, int(port))


def check_http_address(value: str) -> str:
    """Return an address to listen on as ``check_listen_address`` does, or the address of a Unix socket.

    Raises ValueError if it is none.
    """
    path = unix_path(value)
    if path is None:
        return check_listen_address(value)
    if not path.startswith("/") or len(path.encode()) > _MAX_PATH_BYTES or "\0" in path:
        raise ValueError(
            f"{value!r} is not unix:/PATH (absolute, {_MAX_PATH_BYTES} bytes at most), nor HOST:PORT"
        )
    return value


def unix_path(address: str) -> str | None:
    """Return the path of a Unix socket's address; None for "host:port"."""
    return address.removeprefix(_UNIX) if address.startswith(_UNIX) else None


def check_address(value: str) -> str:
    """Return an address to connect to, as ``check_listen_address`` does; the host must be given."""
    checked = check_listen_address(value)
    if value.startswith(":") and value.count(":") == 1:
        raise ValueError(f"{value!r} names no host; write HOST:PORT")
    return checked


def split_address(address: str) -> tuple[str, int]:
    """Split a checked address; brackets of an IPv6 host are removed."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 host; the inverse of ``split_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach an address; a name other than localhost counts as reachable."""
    if unix_path(address) is not None:
        return True
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def local_address(address: str) -> str:
    """Return the address at which this machine reaches a server that listens on ``address``."""
    host, port = split_address(address)
    return join_address("127.0.0.1", port) if host in _WILDCARDS else address
