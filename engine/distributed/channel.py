"""The two ends of the channel between an executor and one rank process.

A message of up to SLOT_BYTES goes through a ring in shared memory, a longer one over ZeroMQ, announced in its slot. One
byte on a pair of sockets (the doorbell) wakes the other side. The doorbell shows deaths too: when either process ends,
however it ends, the other reads the end of the stream.

A ring has one writer, a fixed number of readers and bounded slots. Every reader gets every message, in order. The memory is
an anonymous file, so nothing of it is left when the last process that has it is gone. The ring neither waits nor wakes a
reader.
"""

import contextlib
import mmap
import os
import socket
import struct
import tempfile
from multiprocessing import Pipe
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from contract.decoding import msgpack_decoder
from contract.errors import InternalError, SettingError
from engine.distributed.messages import Answer

_WORD = 8
_LINE = 64
_HEADER_WORDS = 2
_NAME = "kvbaton-ranks"
SLOT_BYTES = 10 * 2**20
"""Payloads above 10 MB go over ZeroMQ: a slot of the ring has a fixed size."""
_NUM_SLOTS = 4
_INLINE = b"\x00"
_LARGE = b"\x01"
_LARGE_SECONDS = 60.0
_LENGTH = struct.Struct("<Q")
# A slot with room for the flag in front, a multiple of a cache line.
_RING_SLOT_BYTES = SLOT_BYTES + 64


class Ring:
    """One process's view of a ring; all views are made with the same numbers."""

    def __init__(self, descriptor: int, num_readers: int, num_slots: int, slot_bytes: int) -> None:
        if slot_bytes % _WORD:
            raise InternalError(f"a slot has {slot_bytes} bytes; it must be a multiple of {_WORD}")
        self._num_readers = num_readers
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._memory = mmap.mmap(descriptor, ring_bytes(num_readers, num_slots, slot_bytes))
        self._bytes = memoryview(self._memory)
        self._words = self._bytes.cast("Q")
        self._num_written = 0

    @property
    def num_unread(self) -> int:
        """The number of messages that the slowest reader has not read; in the writer's view."""
        return self._num_written - min(
            self._words[self._counter(reader)] for reader in range(self._num_readers)
        )

    @property
    def num_written(self) -> int:
        """The number of messages that the writer has completed, in any view."""
        return max(self._words[self._slot(number)[0]] for number in range(1, self._num_slots + 1))

    def write(self, payload: bytes) -> None:
        """Write the next message. Raises InternalError, and writes nothing, if the slowest reader is a ring behind."""
        if len(payload) > self._slot_bytes:
            raise InternalError(f"{len(payload)} bytes do not fit into a slot of {self._slot_bytes}")
        if (behind := self.num_unread) >= self._num_slots:
            raise InternalError(
                f"a reader is {behind} messages behind, and there are {self._num_slots} slots"
            )
        number = self._num_written + 1
        header, start = self._slot(number)
        # The number comes last: a reader accepts a slot by it. Each number is one aligned word, and between the writer's
        # last store and the reader's first load there is a system call on each side (the doorbell), which orders them on
        # every processor; a wrong number shows that this rule was broken.
        self._bytes[start : start + len(payload)] = payload
        self._words[header + 1] = len(payload)
        self._words[header] = number
        self._num_written = number

    def read(self, reader: int) -> bytes:
        """Return the next message for this reader. Raises InternalError if it is not written yet, or was written over."""
        counter = self._counter(reader)
        number = self._words[counter] + 1
        header, start = self._slot(number)
        if self._words[header] != number:
            raise InternalError(f"message {number} was announced, and its slot holds {self._words[header]}")
        payload = bytes(self._bytes[start : start + self._words[header + 1]])
        self._words[counter] = number  # only now may the writer use the slot again
        return payload

    def close(self) -> None:
        """Unmap the memory. May be called twice."""
        self._words.release()
        self._bytes.release()
        self._memory.close()

    def _counter(self, reader: int) -> int:
        return reader * _LINE // _WORD

    def _slot(self, number: int) -> tuple[int, int]:
        """Return the slot's first word, and the byte at which its payload starts."""
        index = (number - 1) % self._num_slots
        start = self._num_readers * _LINE + index * (_HEADER_WORDS * _WORD + self._slot_bytes)
        return start // _WORD, start + _HEADER_WORDS * _WORD


def ring_bytes(num_readers: int, num_slots: int, slot_bytes: int) -> int:
    """Return the size of a ring: a counter per reader on a cache line of its own, then the slots."""
    return num_readers * _LINE + num_slots * (_HEADER_WORDS * _WORD + slot_bytes)


def create_shared_file(num_bytes: int) -> int:
    """Return the descriptor of an anonymous file of zeros; pages take memory when they are written."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def create_ring_file(num_readers: int) -> int:
    """Return the descriptor of the memory for ``calls_ring``, or with one reader for ``answers_ring``."""
    return create_shared_file(ring_bytes(num_readers, _NUM_SLOTS, _RING_SLOT_BYTES))


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
        """Announce a message; if the other process has ended, ``wait`` notices it."""
        with contextlib.suppress(OSError):
            self._end.send(b"!")

    def wait(self) -> bool:
        """Wait for the next announcement; return False if the other process has ended."""
        try:
            return bool(self._end.recv(1))
        except OSError:
            return False

    def close(self) -> None:
        """Close this end, so that the other end's ``wait`` returns False."""
        self._end.close()


class LargeSocket:
    """A ZeroMQ socket of the kind PAIR, for payloads that fit into no slot."""

    def __init__(self, end: "zmq.Socket[bytes]") -> None:
        end.setsockopt(zmq.LINGER, 0)
        end.setsockopt(zmq.SNDHWM, 0)  # no bounds: the ring's slots bound how many payloads wait
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


class RankDescriptors(NamedTuple):
    """The rank's end of its channel, as its process inherits it."""

    doorbell: int
    answers: int
    tier_reports: int


class RankChannel:
    """An executor's end of the channel to one rank.

    theirs: holds the rank's end, ``descriptors``, open here, until its process has inherited it. tier_reports: our end of
    the pipe over which the rank's KV tiers report. Raises SettingError if the path of the temporary folder is too
    long for a socket.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", path: Path) -> None:
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgpack_decoder(Answer)
        with contextlib.ExitStack() as undo:
            self.theirs = undo.enter_context(contextlib.ExitStack())
            end = undo.enter_context(context.socket(zmq.PAIR))
            self.large = LargeSocket(end)
            self.large_address = _bind(end, path)
            our_bell, their_bell = socket.socketpair()
            self.theirs.callback(their_bell.close)
            self.doorbell = Doorbell(our_bell)
            undo.callback(self.doorbell.close)
            descriptor = create_ring_file(num_readers=1)
            self.theirs.callback(os.close, descriptor)
            self._answers = answers_ring(descriptor)
            undo.callback(self._answers.close)
            self.tier_reports, their_reports = Pipe(duplex=False)
            self.theirs.callback(their_reports.close)
            undo.callback(self.tier_reports.close)
            self.descriptors = RankDescriptors(their_bell.fileno(), descriptor, their_reports.fileno())
            self._owned = undo.pop_all()

    @property
    def num_answered(self) -> int:
        """The number of answers that the rank has written; whether they were taken does not matter."""
        return self._answers.num_written

    def receive_answer(self) -> Answer | None:
        """Return the answer that the doorbell announces, or None if the process has ended instead."""
        if not self.doorbell.wait():
            return None
        return self._decoder.decode(read_message(self._answers, 0, self.large))

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
