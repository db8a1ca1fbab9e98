"""The two ends of the way between an executor and one rank process.

A message up to SLOT_BYTES goes through a ring in shared memory, a longer one over ZeroMQ; in both cases its slot tells,
and one byte on a pair of sockets (the doorbell) wakes the other side. The doorbell is the life line too: when either
process ends, however it ends, the other reads the end of the stream.
"""

import contextlib
import socket
import struct

import zmq

from contract.errors import InternalError
from engine.distributed.ring import Ring

SLOT_BYTES = 10 * 2**20
"""Payloads above 10 MB go over ZeroMQ: a slot of the ring has a fixed size."""
NUM_SLOTS = 4
_INLINE = b"\x00"
_LARGE = b"\x01"
_LARGE_SECONDS = 60.0
_LENGTH = struct.Struct("<Q")
RING_SLOT_BYTES = SLOT_BYTES + 64
"""A slot with room for the flag in front, a multiple of a cache line."""


def calls_ring(descriptor: int, num_ranks: int) -> Ring:
    """The ring by which an executor speaks to all ranks."""
    return Ring(descriptor, num_ranks, NUM_SLOTS, RING_SLOT_BYTES)


def answers_ring(descriptor: int) -> Ring:
    """The ring by which one rank answers."""
    return Ring(descriptor, 1, NUM_SLOTS, RING_SLOT_BYTES)


class Doorbell:
    """One end of the pair of sockets; a byte for each message. Not used from two threads at once."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """For ``multiprocessing.connection.wait``: readable when there is a message, or nobody."""
        return self._end.fileno()

    def ring(self) -> None:
        """Announce a message; an other end that is gone is noticed by ``take``."""
        with contextlib.suppress(OSError):
            self._end.send(b"!")

    def take(self) -> bool:
        """Wait for the next announcement. False: the other process has ended."""
        try:
            return bool(self._end.recv(1))
        except OSError:
            return False

    def close(self) -> None:
        """Hang up: the other end's ``take`` returns False."""
        self._end.close()


class LargeLine:
    """Payloads that fit into no slot, over a ZeroMQ socket of the kind PAIR."""

    def __init__(self, end: "zmq.Socket[bytes]") -> None:
        end.setsockopt(zmq.LINGER, 0)
        end.setsockopt(zmq.SNDHWM, 0)
        end.setsockopt(zmq.RCVHWM, 0)
        self._end = end

    def wait_connected(self, timeout_seconds: float) -> bool:
        """Until the other side is there."""
        return bool(self._end.poll(int(timeout_seconds * 1000), zmq.POLLOUT))

    def send(self, payload: bytes) -> None:
        """Queue the payload."""
        self._end.send(payload)

    def receive(self, num_bytes: int) -> bytes:
        """The payload that a slot has announced. Raises InternalError when it does not come, or another one does."""
        if not self._end.poll(int(_LARGE_SECONDS * 1000)):
            raise InternalError(
                f"{num_bytes} bytes were announced, and did not come in {_LARGE_SECONDS:.0f} s"
            )
        payload = self._end.recv()
        if len(payload) != num_bytes:
            raise InternalError(f"{num_bytes} bytes were announced, and {len(payload)} have come")
        return payload

    def close(self) -> None:
        """Drop what was not sent."""
        self._end.close()


def put(ring: Ring, lines: list[LargeLine], payload: bytes) -> None:
    """Write a message; a long one goes to each of the lines. The doorbells are the caller's."""
    if len(payload) <= SLOT_BYTES:
        ring.write(_INLINE + payload)
        return
    ring.write(_LARGE + _LENGTH.pack(len(payload)))
    for line in lines:
        line.send(payload)


def get(ring: Ring, reader: int, line: LargeLine) -> bytes:
    """Read the message that a doorbell has announced."""
    slot = ring.read(reader)
    if slot[:1] == _INLINE:
        return slot[1:]
    return line.receive(*_LENGTH.unpack(slot[1:]))
