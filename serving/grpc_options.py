"""Channel and server options of gRPC, in one place."""

from typing import Any

_MAX_INTERNAL_BYTES = 64 * 2**20
_INTERNAL_HANDSHAKE_MS = 10_000
"""For TLS and HTTP/2: a stranger who says nothing holds a connection for so long."""
_MAX_CONNECTION_AGE_MS = 3_600_000
_MAX_METADATA_BYTES = 16 * 2**10
_NEVER_MS = 2**31 - 1
_MANY = 2**20
"""The library takes no 2**31 - 1 for no limit."""
_MAX_STREAMS = 128
"""Calls at once on one public connection; more wait on the client's side."""
_PUBLIC_KEEPALIVE_MS = 30_000

Options = list[tuple[str, Any]]


def _ms(seconds: float) -> int:
    """Milliseconds as the library takes them."""
    return min(int(seconds * 1000), _NEVER_MS)


def internal_server_options(peer_timeout_seconds: float, max_connections: int = _MANY) -> Options:
    """A server that our own processes keep streams open to: a silent peer's connection ends within the timeout.

    max_connections: those that have shown no certificate yet included; what comes beyond is closed.

    Peers may ping it as often as they like, and no other process can listen on the same port.
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
    """A channel to another of our processes, for short calls. A new channel never shares an old one's connection.

    Its connection stays while nothing is called: a new one would need a descriptor that may be missing then.
    """
    return [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.client_idle_timeout_ms", _NEVER_MS),
        ("grpc.max_receive_message_length", _MAX_INTERNAL_BYTES),
        ("grpc.max_send_message_length", _MAX_INTERNAL_BYTES),
    ]


def internal_stream_options(peer_timeout_seconds: float) -> Options:
    """A channel that carries one long stream: a silent peer's stream ends within the timeout."""
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
) -> Options:
    """Return the options of a server for clients: what a client may hold, whether or not it has shown a key.

    max_body_bytes: of a request. handshake_seconds: for TLS and HTTP/2. idle_seconds: a connection without a call is
    closed after it. call_seconds: what a call may last when its connection has reached its age. A client whose system
    acknowledges nothing for a keepalive period loses its connection. No other process can listen on the same port.
    """
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_body_bytes),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", _ms(handshake_seconds)),
        ("grpc.http2.settings_timeout", _ms(handshake_seconds)),
        ("grpc.max_connection_idle_ms", _ms(idle_seconds)),
        ("grpc.max_connection_age_ms", _MAX_CONNECTION_AGE_MS),
        ("grpc.max_connection_age_grace_ms", _ms(call_seconds)),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        (
            "grpc.http2.bdp_probe",
            0,
        ),  # its windows grow to megabytes a call, for callers without a key as well
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", _PUBLIC_KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _PUBLIC_KEEPALIVE_MS),
        ("grpc.http2.ping_timeout_ms", _PUBLIC_KEEPALIVE_MS),
    ]
