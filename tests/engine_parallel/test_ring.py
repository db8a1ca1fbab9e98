"""The ring in shared memory: every reader gets every message in order, and the slowest one delays the writer."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from contract.errors import InternalError
from engine.distributed.channel import Ring, create_shared_file, ring_bytes

READERS, SLOTS, SLOT_BYTES = 2, 3, 64


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = create_shared_file(ring_bytes(READERS, SLOTS, SLOT_BYTES))
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def rings(descriptor: int) -> Iterator[list[Ring]]:
    """The writer's view, and one for each reader."""
    with ExitStack() as stack:
        views = [Ring(descriptor, READERS, SLOTS, SLOT_BYTES) for _ in range(1 + READERS)]
        for view in views:
            stack.callback(view.close)
        yield views


def test_every_reader_gets_every_message_in_order(rings: list[Ring]) -> None:
    """D3: at different speeds, over many rounds of the ring, with payloads of all lengths."""
    writer, first, second = rings
    payloads = [bytes([index % 256]) * (index % (SLOT_BYTES + 1)) for index in range(200)]
    seen = []
    for index, payload in enumerate(payloads):
        writer.write(payload)
        assert first.read(0) == payload
        if index % SLOTS == SLOTS - 1:
            seen += [second.read(1) for _ in range(SLOTS)]
    assert seen == payloads[: len(seen)] and len(seen) == 198


def test_every_view_sees_how_many_messages_are_written(rings: list[Ring]) -> None:
    """P4: read or unread, over several rounds of the ring."""
    writer, first, second = rings
    for count in range(4 * SLOTS):
        assert [view.num_written for view in rings] == [count] * 3
        writer.write(b"a")
        if count % 2:
            for reader, view in enumerate((first, second)):
                assert [view.read(reader), view.read(reader)] == [b"a", b"a"]


def test_the_slowest_reader_delays_the_writer(rings: list[Ring]) -> None:
    writer, first, second = rings
    for index in range(SLOTS):
        writer.write(bytes([index]))
        assert first.read(0) == bytes([index])
    with pytest.raises(InternalError, match="3 messages behind, and there are 3 slots"):
        writer.write(b"one too many")
    assert second.read(1) == b"\x00"
    writer.write(b"now")
    assert [second.read(1) for _ in range(SLOTS)] == [b"\x01", b"\x02", b"now"]
    assert first.read(0) == b"now"


def test_an_unwritten_slot_cannot_be_read(rings: list[Ring]) -> None:
    writer, first, _ = rings
    with pytest.raises(InternalError, match="message 1 was announced, and its slot holds 0"):
        first.read(0)
    writer.write(b"a")
    assert first.read(0) == b"a"
    with pytest.raises(InternalError, match="message 2"):
        first.read(0)


def test_an_overwritten_slot_cannot_be_read(descriptor: int, rings: list[Ring]) -> None:
    """A second writer, which is not allowed, is detected by the message numbers."""
    writer, first, second = rings
    for payload in (b"a", b"b", b"c"):
        writer.write(payload)
        assert first.read(0) == second.read(1) == payload
    writer.write(b"d")
    intruder = Ring(descriptor, READERS, SLOTS, SLOT_BYTES)
    intruder.write(b"not from here")
    intruder.close()
    for reader, view in enumerate((first, second)):
        with pytest.raises(InternalError, match="message 4 was announced, and its slot holds 1"):
            view.read(reader)


def test_payloads_are_bounded(rings: list[Ring]) -> None:
    writer, *readers = rings
    writer.write(b"x" * SLOT_BYTES)
    assert [reader.read(index) for index, reader in enumerate(readers)] == [b"x" * SLOT_BYTES] * READERS
    with pytest.raises(InternalError, match="65 bytes do not fit into a slot of 64"):
        writer.write(b"x" * (SLOT_BYTES + 1))


def test_slots_are_aligned_to_words(descriptor: int) -> None:
    with pytest.raises(InternalError, match="multiple of 8"):
        Ring(descriptor, READERS, SLOTS, 60)


ECHO = """
import sys
from engine.distributed.channel import Ring
there, back = (Ring(int(fd), 1, 2, 4096) for fd in sys.argv[1:3])
for line in sys.stdin:
    back.write(there.read(0)[::-1])
    print(flush=True)
"""


def test_between_processes() -> None:
    """1,000 messages in both directions through four slots; lines on the pipes signal each message."""
    with ExitStack() as stack:
        files = [create_shared_file(ring_bytes(1, 2, 4096)) for _ in range(2)]
        there, back = (Ring(file, 1, 2, 4096) for file in files)
        for ring in (there, back):
            stack.callback(ring.close)
        command = [sys.executable, "-c", ECHO, *map(str, files)]
        process = stack.enter_context(
            subprocess.Popen(
                command, pass_fds=files, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        for file in files:
            os.close(file)
        assert process.stdin is not None and process.stdout is not None
        for index in range(1000):
            payload = index.to_bytes(2, "big") * (index + 1)
            there.write(payload)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "\n"
            assert back.read(0) == payload[::-1]
        process.stdin.close()
        assert process.wait(30) == 0
