"""Channel and server options of gRPC, in one place."""

_MAX_INTERNAL_BYTES = 64 * 2**20

Options = list[tuple[str, int]]


def internal_server_options(peer_timeout_seconds: float) -> Options:
    """A server that our own processes keep streams open to: a silent peer's connection ends within the timeout.

    Peers may ping it as often as they like, and no other process can listen on the same port.
    """
    half = max(100, int(peer_timeout_seconds * 500))
    return [
        ("grpc.so_reuseport", 0),
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
    """A channel to another of our processes, for short calls. A new channel never shares an old one's connection."""
    return [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", _MAX_INTERNAL_BYTES),
        ("grpc.max_send_message_length", _MAX_INTERNAL_BYTES),
    ]


def internal_stream_options(peer_timeout_seconds: float) -> Options:
    """A channel that carries one long stream: a silent peer's stream ends within the timeout."""
    half = max(100, int(peer_timeout_seconds * 500))
    return [
        *internal_channel_options(),
        ("grpc.keepalive_time_ms", half),
        ("grpc.keepalive_timeout_ms", half),
        ("grpc.http2.ping_timeout_ms", half),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def public_server_options(max_body_bytes: int) -> Options:
    """A server for clients: requests up to ``max_body_bytes``; no other process can listen on the same port."""
    return [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", max_body_bytes)]
