"""``shm`` between real processes: no wrong byte is used if one dies or stops in the middle of a read."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from contract.errors import KvbatonError, PeerUnreachableError, WorkerLostError
from kv_transfer.protocol.reads import RangeGrant, Source
from tests.kv_transfer.fakes import GatedRead
from tests.kv_transfer.shm_port import (
    GATED_BLOCK,
    NAME,
    NUM_BLOCKS,
    TOKEN,
    Reader,
    ShmPort,
    from_words,
    in_words,
)
from tests.processes import stop

ROOT = Path(__file__).parents[2]


class Child:
    """A process that plays one role."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        heard: dict[str, Any] = json.loads(self.process.stdout.readline())
        return heard


@contextmanager
def child(*arguments: str) -> Iterator[Child]:
    command = [sys.executable, "-m", "tests.kv_transfer.shm_port", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            yield Child(process)
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


class Fetching:
    """A fetch of everything in a thread, held in its middle."""

    def __init__(self, reader: Reader, source: Source, grants: tuple[RangeGrant, ...]) -> None:
        self.read, self.outcome = GatedRead(GATED_BLOCK), list[KvbatonError | None]()
        self._thread = threading.Thread(target=self._run, args=(reader, source, grants))
        self._thread.start()
        assert self.read.is_waiting.wait(30)

    def go_on(self) -> KvbatonError | None:
        self.read.gate.set()
        self._thread.join(30)
        return self.outcome[0]

    def _run(self, reader: Reader, source: Source, grants: tuple[RangeGrant, ...]) -> None:
        try:
            reader.fetch(source, range(NUM_BLOCKS), grants, self.read)
            self.outcome.append(None)
        except KvbatonError as error:
            self.outcome.append(error)


def lent_by(sender: Child) -> tuple[Source, tuple[RangeGrant, ...]]:
    """Return the source and the grant that a sender has printed."""
    heard = sender.hear()
    return Source("p", "boot", heard["address"], TOKEN, "shm"), from_words(heard["grant"])


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.receiver.close()


def test_a_sender_killed_in_the_middle_of_a_read(reader: Reader, tmp_path: Path) -> None:
    """The mapping outlives the process, so the lent bytes are unchanged; later reads fail."""
    with child("sender", str(tmp_path)) as sender:
        source, grants = lent_by(sender)
        fetching = Fetching(reader, source, grants)
        sender.process.kill()
        sender.process.wait(30)
        assert fetching.go_on() is None
        assert reader.first_bytes(NUM_BLOCKS) == list(range(1, NUM_BLOCKS + 1))
        with pytest.raises(WorkerLostError, match="worker p died"):
            reader.fetch(source, range(1), grants)
        with pytest.raises(PeerUnreachableError, match="worker p does not answer at"):
            reader.fetch(source, range(1), grants)


def test_a_sender_killed_between_two_reads(reader: Reader, tmp_path: Path) -> None:
    """The mapping is there already and would still show the bytes."""
    with child("sender", str(tmp_path)) as sender:
        source, grants = lent_by(sender)
        reader.fetch(source, range(98, 100), grants)
        assert reader.first_bytes(2) == [99, 100]
        sender.process.kill()
        sender.process.wait(30)
        with pytest.raises(KvbatonError) as caught:
            reader.fetch(source, range(1), grants)
        assert caught.value.kind == "worker_lost"


def test_a_sender_stopped_in_the_middle_of_a_read_is_not_needed(reader: Reader, tmp_path: Path) -> None:
    """Its lease stands while it is stopped, so the rest can be read, and more; only who comes new has to wait for it."""
    with child("sender", str(tmp_path)) as sender:
        source, grants = lent_by(sender)
        fetching = Fetching(reader, source, grants)
        stop(sender.process)
        assert fetching.go_on() is None
        assert reader.first_bytes(NUM_BLOCKS) == list(range(1, NUM_BLOCKS + 1))
        reader.fetch(source, range(7, 8), grants)
        assert reader.first_bytes(1) == [8]
        stranger, connecting = Reader(), GatedRead(1000)
        threading.Timer(0.1, connecting.stop).start()
        with pytest.raises(KvbatonError, match="the read was stopped"):
            stranger.fetch(source, range(1), grants, connecting)
        stranger.receiver.close()


def test_a_reader_stopped_across_the_end_of_its_lease_uses_no_byte(tmp_path: Path) -> None:
    """The sender does not wait for it, the blocks are used for something else, and the reader finds out."""
    port = ShmPort(tmp_path)
    try:
        (given,) = port.publish(NAME, range(NUM_BLOCKS))
        with child("receiver", port.sender.address, TOKEN, "boot", in_words(given)) as receiver:
            assert receiver.hear() == {"middle": True}
            stop(receiver.process)
            port.sender.release(NAME)
            assert port.idle == [NAME]
            for block_id in range(NUM_BLOCKS):
                port.memory.fill(block_id, b"somebody else's")
            receiver.process.send_signal(signal.SIGCONT)
            receiver.tell()
            assert receiver.hear() == {"outcome": "StaleLeaseError"}
    finally:
        port.sender.close()


def test_a_reader_that_is_only_stopped_for_a_while_reads_everything(tmp_path: Path) -> None:
    port = ShmPort(tmp_path)
    try:
        (given,) = port.publish(NAME, range(NUM_BLOCKS))
        with child("receiver", port.sender.address, TOKEN, "boot", in_words(given)) as receiver:
            assert receiver.hear() == {"middle": True}
            stop(receiver.process)
            receiver.process.send_signal(signal.SIGCONT)
            receiver.tell()
            assert receiver.hear() == {"outcome": "read"}
    finally:
        port.sender.close()


def test_a_guessed_token_opens_nothing(tmp_path: Path) -> None:
    port = ShmPort(tmp_path)
    try:
        (given,) = port.publish(NAME, range(NUM_BLOCKS))
        with child("receiver", port.sender.address, "guessed", "boot", in_words(given)) as receiver:
            assert receiver.hear() == {"outcome": "PeerUnreachableError"}
    finally:
        port.sender.close()
