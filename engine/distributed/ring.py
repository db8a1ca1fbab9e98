"""Messages from one process to others through shared memory: one writer, a fixed number of readers, bounded slots.

Every reader gets every message, in order. The memory is an anonymous file, so nothing of it is left when the last
process that has it is gone. The ring neither waits nor wakes a reader: see ``engine.distributed.channel``.

Order in memory: the writer stores the payload, the length and, last, the message's number. A reader accepts a slot with
the number that it expects, copies the payload, and only then advances its own counter. Each number is one aligned 8-byte
word. There is a system call (the doorbell) on each side between the writer's last store and the reader's first load,
which orders them on every processor; a wrong number shows that this rule was broken.
"""

import mmap
import os
import tempfile

from contract.errors import InternalError

_WORD = 8
_LINE = 64
_HEADER_WORDS = 2
_NAME = "kvbaton-ranks"


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
    def slot_bytes(self) -> int:
        """The longest payload."""
        return self._slot_bytes

    @property
    def num_written(self) -> int:
        """The number of messages that the writer has completed, in any view."""
        return max(self._words[self._slot(number)[0]] for number in range(1, self._num_slots + 1))

    def write(self, payload: bytes) -> None:
        """Write the next message. Raises InternalError, and writes nothing, if the slowest reader is a ring behind."""
        if len(payload) > self._slot_bytes:
            raise InternalError(f"{len(payload)} bytes do not fit into a slot of {self._slot_bytes}")
        behind = self._num_written - min(
            self._words[self._counter(reader)] for reader in range(self._num_readers)
        )
        if behind >= self._num_slots:
            raise InternalError(
                f"a reader is {behind} messages behind, and there are {self._num_slots} slots"
            )
        number = self._num_written + 1
        header, start = self._slot(number)
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
        self._words[counter] = number
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
