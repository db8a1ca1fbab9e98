"""Bounds the connections to an internal gRPC port whose peers have shown no certificate yet.

gRPC accepts them, and keeps about 50 kB for each that waits in its TLS handshake. A front as on the public port would
carry every token, and its answers to pings would wait for the interpreter (ADR 0033). So nothing is carried here: gRPC
announces each handshake, the process's sockets are looked through, and a connection too many is shut down.
"""

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from contract.addresses import split_address
from serving.http_connections import Connections, address_of

MAX_UNAUTHENTICATED = 256
MAX_PER_ADDRESS = 64
MAX_UNSEEN = 16
# A look takes longer the more sockets there are. A pause of so many times its length, unless ``MAX_UNSEEN`` handshakes
# come, bounds the share of the time that looks take.
_REST = 10
_OWN_DESCRIPTORS = Path("/proc/self/fd")


class _Unauthenticated:
    """A connection whose peer has made no call. It is named by its inode, since its descriptor may be used again."""

    is_waiting = True

    def __init__(self, inode: int, descriptor: int, peer: tuple[str, int]) -> None:
        self.inode = inode
        self.peer = peer
        self._descriptor = descriptor

    def abort(self) -> None:
        """End the connection, which gRPC then closes; do nothing if it has ended."""
        # A duplicate cannot be closed, and its number used again, between the check of its inode and the shutdown.
        with suppress(OSError), socket.socket(fileno=os.dup(self._descriptor)) as own:
            if os.fstat(own.fileno()).st_ino == self.inode:
                own.shutdown(socket.SHUT_RDWR)


class UnauthenticatedConnections:
    """Lists the connections of one port over which no call has come: only a peer with a certificate can call.

    A connection too many costs the one that has waited longest, of the address with the most, its connection. Without
    ``/proc`` nothing is bounded here. May be used by any thread.
    """

    def __init__(
        self, max_unauthenticated: int = MAX_UNAUTHENTICATED, max_per_address: int = MAX_PER_ADDRESS
    ) -> None:
        self._lock = threading.Lock()
        self._book = Connections(max_unauthenticated, max_per_address, min_age_seconds=0.0)
        self._port = 0
        self._seen: dict[int, _Unauthenticated] = {}  # the connections of the last look, by inode
        # The peers that have made a call, of connections that were open at the last look or have come since: the call of a
        # new connection may come before the look that finds it.
        self._met: set[tuple[str, int]] = set()
        self._others: set[int] = set()  # the inodes of the last look that are no connections to the port
        self._num_unseen = 0
        self._rest_until = 0.0

    def __len__(self) -> int:
        """Return how many connections were unauthenticated at the last look."""
        return len(self._book)

    def watch(self, address: str) -> None:
        """Begin with the connections to this "host:port"."""
        self._port = split_address(address)[1]

    def on_handshake(self) -> None:
        """Look at the port, unless the last look was just now. Called by gRPC's thread, which waits meanwhile."""
        with self._lock:
            self._num_unseen += 1
            if self._num_unseen >= MAX_UNSEEN or time.monotonic() >= self._rest_until:
                self._look()

    def meet(self, context: Any) -> None:
        """Record that a call has come over its connection."""
        # gRPC's name of the peer is "ipv4:127.0.0.1:50000" or "ipv6:%5B::1%5D:50000".
        peer = _named(*split_address(unquote(context.peer()).partition(":")[2]))
        with self._lock:
            self._met.add(peer)
            for one in self._seen.values():
                if one.peer == peer:
                    self._book.remove(one)

    def _look(self) -> None:
        self._num_unseen = 0
        began = time.monotonic()
        found = dict(_sockets())
        for inode in self._seen.keys() - found.keys():
            gone = self._seen.pop(inode)
            self._met.discard(gone.peer)
            self._book.remove(gone)
        self._others &= found.keys()
        for inode in found.keys() - self._seen.keys() - self._others:
            if (peer := _peer_at(found[inode], self._port)) is not None:
                self._add(_Unauthenticated(inode, found[inode], peer))
            else:
                self._others.add(inode)
        self._met &= {one.peer for one in self._seen.values()}
        now = time.monotonic()
        self._rest_until = now + _REST * (now - began)

    def _add(self, connection: _Unauthenticated) -> None:
        self._seen[connection.inode] = connection
        if connection.peer in self._met:
            return
        address = address_of(connection.peer)
        if self._book.make_room() and self._book.admits(address):
            self._book.add(connection, address)


def _sockets() -> Iterator[tuple[int, int]]:
    """Yield inode and descriptor of each socket of this process."""
    with suppress(OSError), os.scandir(_OWN_DESCRIPTORS) as entries:
        for entry in entries:
            with suppress(OSError):
                found = os.fstat(int(entry.name))
                if stat.S_ISSOCK(found.st_mode):
                    yield found.st_ino, int(entry.name)


def _peer_at(descriptor: int, port: int) -> tuple[str, int] | None:
    """Return the peer of a connection to this port; None for another socket."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as own:
        if own.family in (socket.AF_INET, socket.AF_INET6) and own.getsockname()[1] == port:
            name = own.getpeername()
            return _named(name[0], name[1])
    return None


def _named(host: str, port: int) -> tuple[str, int]:
    """Return one name for an address, whether it is written as IPv4 or as IPv6."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host, port
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return str(address), port
