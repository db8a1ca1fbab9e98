"""The two ends of the channel between an executor and one rank process.

A message of up to SLOT_BYTES goes through a ring in shared memory, a longer one over ZeroMQ, announced in its slot. One
byte on a pair of sockets (the doorbell) wakes the other side. The doorbell shows deaths too: when either process ends,
however it ends, the other reads the end of the stream.
"""

import contextlib
import os
import socket
import struct
from pathlib import Path

import msgspec
import zmq

from contract.decoding import msgpack_decoder
from contract.errors import InternalError, SettingError
from engine.distributed.messages import Answer
from engine.distributed.ring import Ring, create_shared_file, ring_bytes

SLOT_BYTES = 10 * 2**20
"""Payloads above 10 MB go over ZeroMQ: a slot of the ring has a fixed size."""
_NUM_SLOTS = 4
_INLINE = b"\x00"
_LARGE = b"\x01"
_LARGE_SECONDS = 60.0
_LENGTH = struct.Struct("<Q")
_RING_SLOT_BYTES = SLOT_BYTES + 64
"""A slot with room for the flag in front, a multiple of a cache line."""


def create_calls_file(num_ranks: int) -> int:
    """Return the descriptor of the memory for ``calls_ring``."""
    return create_shared_file(ring_bytes(num_ranks, _NUM_SLOTS, _RING_SLOT_BYTES))


def calls_ring(descriptor: int, num_ranks: int) -> Ring:
    """Return the ring in which an executor writes calls for all ranks."""
    return Ring(descriptor, num_ranks, _NUM_SLOTS, _RING_SLOT_BYTES)


def answers_ring(descriptor: int) -> Ring:
    """Return the ring in which one rank writes its answers."""
    return Ring(descriptor, 1, _NUM_SLOTS, _RING_SLOT_BYTES)


class Doorbell:
    """One end of the pair of sockets; a byte for each message. Used from one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """Return the descriptor, for ``multiprocessing.connection.wait``: readable at a message and at the stream's end."""
        return self._end.fileno()

    def ring(self) -> None:
        """Announce a message; if the other process has ended, ``take`` notices it."""
        with contextlib.suppress(OSError):
            self._end.send(b"!")

    def take(self) -> bool:
        """Wait for the next announcement; return False if the other process has ended."""
        try:
            return bool(self._end.recv(1))
        except OSError:
            return False

    def close(self) -> None:
        """Close this end, so that the other end's ``take`` returns False."""
        self._end.close()


class LargeSocket:
    """A ZeroMQ socket of the kind PAIR, for payloads that fit into no slot."""

    def __init__(self, end: "zmq.Socket[bytes]") -> None:
        end.setsockopt(zmq.LINGER, 0)
        end.setsockopt(zmq.SNDHWM, 0)
        end.setsockopt(zmq.RCVHWM, 0)
        self._end = end

    def wait_connected(self, timeout_seconds: float) -> bool:
        """Wait for the other side; return whether it has connected in time."""
        return bool(self._end.poll(int(timeout_seconds * 1000), zmq.POLLOUT))

    def send(self, payload: bytes) -> None:
        """Queue the payload."""
        self._end.send(payload)

    def receive(self, num_bytes: int) -> bytes:
        """Return the payload that a slot has announced. Raises InternalError if it does not come, or another one does."""
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


def write_message(ring: Ring, sockets: list[LargeSocket], payload: bytes) -> None:
    """Write a message; a long one is sent over each of the sockets. The caller rings the doorbells."""
    if len(payload) <= SLOT_BYTES:
        ring.write(_INLINE + payload)
        return
    ring.write(_LARGE + _LENGTH.pack(len(payload)))
    for each in sockets:
        each.send(payload)


def read_message(ring: Ring, reader: int, large: LargeSocket) -> bytes:
    """Read the message that a doorbell has announced."""
    slot = ring.read(reader)
    if slot[:1] == _INLINE:
        return slot[1:]
    return large.receive(*_LENGTH.unpack(slot[1:]))


class RankChannel:
    """An executor's end of the channel to one rank.

    theirs: descriptors of the rank's end (doorbell, answers' ring), open until ``close_theirs``. Raises SettingError if
    the path of the temporary folder is too long for a socket.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", path: Path) -> None:
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgpack_decoder(Answer)
        with contextlib.ExitStack() as undo:
            self._theirs = undo.enter_context(contextlib.ExitStack())
            end = undo.enter_context(context.socket(zmq.PAIR))
            self.large = LargeSocket(end)
            self.large_address = _bind(end, path)
            our_bell, their_bell = socket.socketpair()
            self._theirs.callback(their_bell.close)
            self.doorbell = Doorbell(our_bell)
            undo.callback(self.doorbell.close)
            descriptor = create_shared_file(ring_bytes(1, _NUM_SLOTS, _RING_SLOT_BYTES))
            self._theirs.callback(os.close, descriptor)
            self._answers = answers_ring(descriptor)
            undo.callback(self._answers.close)
            self.their_doorbell = their_bell.fileno()
            self.their_answers = descriptor
            self._owned = undo.pop_all()

    @property
    def num_answered(self) -> int:
        """The number of answers that the rank has written; whether they were taken does not matter."""
        return self._answers.num_written

    def take_answer(self) -> Answer | None:
        """Return the answer that the doorbell announces, or None if the process has ended instead."""
        if not self.doorbell.take():
            return None
        return self._decoder.decode(read_message(self._answers, 0, self.large))

    def close_theirs(self) -> None:
        """Close the rank's end here, once its process has inherited it."""
        self._theirs.close()

    def close(self) -> None:
        """Free everything; ``num_answered`` may not be read any more."""
        self._owned.close()


def _bind(end: "zmq.Socket[bytes]", path: Path) -> str:
    address = f"ipc://{path}"
    try:
        end.bind(address)
    except zmq.ZMQError as error:
        raise SettingError(
            f"the ranks' sockets cannot be made in {path.parent}: {error.strerror}; "
            "set TMPDIR to another (shorter) folder",
            param="TMPDIR",
        ) from error
    return address
