"""Kernel counters of a TCP connection: bytes that the peer acknowledged, and bytes that wait to be read."""

import fcntl
import socket
import struct
import termios

_ACKED_END = 128
"""End of ``tcpi_bytes_acked``, eight bytes, in Linux's ``struct tcp_info``."""


def num_acknowledged(own: socket.socket | None) -> int:
    """Return the number of bytes that the peer's system acknowledged; 0 if the system does not count them."""
    option = getattr(socket, "TCP_INFO", None)
    if own is None or option is None:
        return 0
    try:
        info = own.getsockopt(socket.IPPROTO_TCP, option, _ACKED_END)
    except OSError:
        return 0
    return struct.unpack_from("Q", info, _ACKED_END - 8)[0] if len(info) == _ACKED_END else 0


def has_unread_bytes(own: socket.socket | None) -> bool:
    """Return True if bytes of the peer have arrived and were not read."""
    if own is None:
        return False
    try:
        (count,) = struct.unpack("i", fcntl.ioctl(own.fileno(), termios.FIONREAD, bytes(4)))
    except OSError:
        return False
    return bool(count)
