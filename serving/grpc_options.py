"""Starts gRPC servers; the options of their channels and servers, in one place."""

from typing import Any

import grpc
import grpc.aio

from contract.addresses import join_address, split_address
from contract.errors import SettingError

_MAX_INTERNAL_BYTES = 64 * 2**20
# An unauthenticated client can hold a connection for this time.
_INTERNAL_HANDSHAKE_MS = 10_000
_MAX_CONNECTION_AGE_MS = 3_600_000
_MAX_METADATA_BYTES = 16 * 2**10
_NEVER_MS = 2**31 - 1
# No limit; the library does not accept 2**31 - 1 here.
_MANY = 2**20
# More calls on one public connection wait at the client.
_MAX_STREAMS = 128
_PUBLIC_KEEPALIVE_MS = 30_000

Options = list[tuple[str, Any]]


def _ms(seconds: float) -> int:
    """Convert seconds to milliseconds in the library's range."""
    return min(int(seconds * 1000), _NEVER_MS)


def internal_server_options(peer_timeout_seconds: float, max_connections: int = _MANY) -> Options:
    """Return the options of an internal server: the connection of a silent peer ends within the timeout.

    max_connections: limit of open connections, authenticated or not; further ones are closed. Peers may send pings at any
    rate, and no other process can listen on the same port.
    """
    half = max(100, _ms(peer_timeout_seconds / 2))
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", _INTERNAL_HANDSHAKE_MS),
        ("grpc.http2.settings_timeout", _INTERNAL_HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", half),
        ("grpc.keepalive_timeout_ms", half),
        ("grpc.http2.ping_timeout_ms", half),  # 60 s by default, and then the one above has no effect
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 100),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
        ("grpc.max_receive_message_length", _MAX_INTERNAL_BYTES),
        ("grpc.max_send_message_length", _MAX_INTERNAL_BYTES),
    ]


def internal_channel_options() -> Options:
    """Return the options of a channel to another kvbaton process. A new channel never shares an old one's connection.

    Its connection stays open while it is idle, since no descriptor might be left for a new one.
    """
    return [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.client_idle_timeout_ms", _NEVER_MS),
        ("grpc.max_receive_message_length", _MAX_INTERNAL_BYTES),
        ("grpc.max_send_message_length", _MAX_INTERNAL_BYTES),
    ]


def internal_stream_options(peer_timeout_seconds: float) -> Options:
    """Return the options of a channel for one long stream, which ends within the timeout if the peer is silent."""
    half = max(100, _ms(peer_timeout_seconds / 2))
    return [
        *internal_channel_options(),
        ("grpc.keepalive_time_ms", half),
        ("grpc.keepalive_timeout_ms", half),
        ("grpc.http2.ping_timeout_ms", half),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def public_server_options(
    max_body_bytes: int,
    *,
    max_connections: int,
    handshake_seconds: float,
    idle_seconds: float,
    call_seconds: float,
    ping_seconds: float = 0.0,
) -> Options:
    """Return the options of a public server behind a front, which limit what a client can use, with or without a key.

    max_body_bytes: size of a request. handshake_seconds: time for the settings of HTTP/2. idle_seconds: time after which a
    connection without a call is closed. call_seconds: time for a call to end when its connection has its maximum age. The
    connection of a client whose system acknowledges nothing for a keepalive period is closed. ping_seconds: silence of a
    connection with an open call after which it gets a ping; a keepalive period if 0 or longer.
    """
    keepalive_ms = min(_ms(ping_seconds) or _PUBLIC_KEEPALIVE_MS, _PUBLIC_KEEPALIVE_MS)
    return [
        ("grpc.max_receive_message_length", max_body_bytes),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.http2.settings_timeout", _ms(handshake_seconds)),
        ("grpc.max_connection_idle_ms", _ms(idle_seconds)),
        ("grpc.max_connection_age_ms", _MAX_CONNECTION_AGE_MS),
        ("grpc.max_connection_age_grace_ms", _ms(call_seconds)),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        # The probe would grow windows to megabytes per call, also without a key.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", _PUBLIC_KEEPALIVE_MS),
        ("grpc.http2.ping_timeout_ms", _PUBLIC_KEEPALIVE_MS),
    ]


async def start_grpc(
    server: grpc.aio.Server, address: str, *, param: str, credentials: grpc.ServerCredentials | None = None
) -> str:
    """Start a server on "host:port" (port 0 picks a free one), with TLS if ``credentials`` are given; return its address.

    Raises SettingError that names ``param`` when the address cannot be bound.
    """
    try:
        port = (
            server.add_insecure_port(address)
            if credentials is None
            else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise SettingError(f"{param} is {address}: cannot listen there, {error}", param=param) from error
    await server.start()
    return join_address(split_address(address)[0], port)
