"""The listener of a public gRPC port, in front of gRPC's own server, which listens on a private Unix socket.

The front accepts and bounds connections as the HTTP port does, ends TLS, and counts the frames that clients send (ADR 0033).
To gRPC, a client's name is the path of the socket that the front connects with, whose last part is the client's address.
"""

import os
import socket
import ssl

import grpc.aio

from contract.addresses import join_address, split_address
from contract.errors import SettingError
from contract.run_folder import RunFolder
from serving.grpc_connection import GrpcConnection
from serving.http_acceptor import HttpAcceptor, listen
from serving.http_connections import Connections, HttpLimits

_INNER_NAME = "server".ljust(59, "-")
"""Its length is that of a client's longest name: a folder whose path is too long for one is rejected at the start."""


class GrpcFront:
    """Owns the listening sockets and the folder of the Unix socket, from ``start_front`` until ``close``."""

    def __init__(
        self,
        sockets: list[socket.socket],
        limits: HttpLimits,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._folder = RunFolder("front")
        self._inner = os.fspath(self._folder.path / _INNER_NAME)
        self.connections = Connections(limits.max_connections, limits.max_per_address)

        def make() -> GrpcConnection:
            return GrpcConnection(self.connections, limits, self._connect)

        self._acceptor = HttpAcceptor(sockets, make, self.connections, limits, tls, refusal=b"")

    @property
    def inner_address(self) -> str:
        """The address of gRPC's server."""
        return f"unix:{self._inner}"

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return self._acceptor.port

    def start(self) -> None:
        """Begin to accept."""
        self._acceptor.start()

    def stop_listening(self) -> None:
        """Accept no further connection; open ones continue."""
        self._acceptor.stop_listening()

    def close(self) -> None:
        """Stop listening, close open connections and remove the folder."""
        self._acceptor.close()
        self.connections.abort_all()
        self._folder.close()

    def _connect(self, name: object) -> socket.socket:
        own = self._folder.path / _named(name)
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.setblocking(False)
            connected.bind(os.fspath(own))
            own.unlink()  # the name stays, and the next client of this address may have it
            connected.connect(self._inner)
        except OSError:
            connected.close()
            raise
        return connected


async def start_front(
    server: grpc.aio.Server,
    address: str,
    *,
    param: str,
    limits: HttpLimits,
    tls: ssl.SSLContext | None = None,
    is_shared: bool = False,
) -> tuple[GrpcFront, str]:
    """Start the server behind a front on "host:port" (port 0 picks a free one); return the front and its real address.

    is_shared: other processes of this user may listen on the same port. Raises SettingError that names ``param`` when the
    address cannot be bound.
    """
    host, port = split_address(address)
    try:
        sockets = await listen(host, port, is_shared=is_shared)
    except OSError as error:
        raise SettingError(
            f"{param} is {address}: cannot listen there, {error.strerror or error}", param=param
        ) from error
    front = GrpcFront(sockets, limits, tls)
    try:
        server.add_insecure_port(front.inner_address)
    except RuntimeError as error:
        front.close()
        raise SettingError(
            f"the gRPC server's socket cannot be made at {front.inner_address}: {error}; "
            "set TMPDIR to another (shorter) folder",
            param="TMPDIR",
        ) from error
    await server.start()
    front.start()
    return front, join_address(host, front.port)


def _named(name: object) -> str:
    """Return gRPC's name of a TCP peer: "ipv4:127.0.0.1:50000" or "ipv6:[::1]:50000"."""
    assert isinstance(name, tuple)
    kind = "ipv6" if ":" in name[0] else "ipv4"
    return f"{kind}:{join_address(name[0], name[1])}"
