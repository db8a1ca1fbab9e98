"""``shm`` in one process: what a reader gets, what it cannot do, and how the end of a lease is seen."""

import gc
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.errors import KvbatonError, PeerUnreachableError, SettingError, TransferError
from kv_transfer.links.framing import HEADER, as_frame
from kv_transfer.protocol.reads import (
    LeaseName,
    RangeGrant,
    Read,
    ReadRequest,
    ReadStoppedError,
    Source,
    StaleLeaseError,
)
from kv_transfer.transports.shm.sender import NUM_DESCRIPTORS, check_supported
from kv_transfer.transports.transport import Senders
from tests.kv_transfer.fakes import ByteMemory, GatedRead
from tests.kv_transfer.greetings import prove_reading
from tests.kv_transfer.shm_port import GATED_BLOCK, LAYOUT, NAME, NUM_BLOCKS, TOKEN, Reader, ShmPort

OTHER = LeaseName("u", 0, "other")


@pytest.fixture
def port(tmp_path: Path) -> Iterator[ShmPort]:
    made = ShmPort(tmp_path)
    yield made
    made.sender.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.receiver.close()


class Fetching:
    """A fetch of blocks 0..NUM_BLOCKS-1 in a thread, held before block GATED_BLOCK."""

    def __init__(self, reader: Reader, port: ShmPort) -> None:
        self.read, self._outcome = GatedRead(GATED_BLOCK), list[KvbatonError | None]()
        self._thread = threading.Thread(target=self._run, args=(reader, port.source, port.grants[NAME]))
        self._thread.start()
        assert self.read.is_waiting.wait(30)

    def go_on(self) -> KvbatonError | None:
        self.read.gate.set()
        self._thread.join(30)
        return self._outcome[0]

    def _run(self, reader: Reader, source: Source, grants: tuple[RangeGrant, ...]) -> None:
        try:
            reader.fetch(source, range(NUM_BLOCKS), grants, self.read)
            self._outcome.append(None)
        except KvbatonError as error:
            self._outcome.append(error)


def descriptors_of(port: ShmPort) -> list[int]:
    """Return the descriptors that an authenticated reader gets."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(30)
        sock.connect(port.sender.address)
        prove_reading(sock, Source("p", "boot", port.sender.address, TOKEN, "shm"))
        return socket.recv_fds(sock, HEADER.size, NUM_DESCRIPTORS)[1]


def test_blocks_arrive_by_their_index_in_the_lease(port: ShmPort, reader: Reader) -> None:
    for block_ids in ([6, 7], [3], [90, 5]):
        port.publish(NAME, block_ids)
    reader.fetch(port.source, range(1, 4), port.grants[NAME])
    assert reader.first_bytes(4) == [8, 4, 91, 0]


@pytest.mark.parametrize("blocks", [range(2, 3), range(-1, 0), range(-1, 1), range(1, 3), range(99, 100)])
def test_nobody_reads_outside_a_lease(port: ShmPort, reader: Reader, blocks: range) -> None:
    port.publish(NAME, [6, 7])
    with pytest.raises(StaleLeaseError, match="is not readable; 2 blocks are"):
        reader.fetch(port.source, blocks, port.grants[NAME])
    reader.fetch(port.source, range(1), port.grants[NAME])


def test_a_lease_that_is_over_gives_no_byte(port: ShmPort, reader: Reader) -> None:
    """Also when its slot has been given to the next lease; what was granted by a lease stays with it."""
    over = port.publish(NAME, [6, 7])
    port.sender.release(NAME)
    assert port.idle == [NAME]
    for _ in range(2):
        with pytest.raises(StaleLeaseError, match="ended before its blocks were read"):
            reader.fetch(port.source, range(1), over)
        assert reader.first_bytes(1) == [0]
        port.publish(OTHER, [6, 7])
    reader.fetch(port.source, range(1), port.grants[OTHER])
    port.publish(NAME, [3])
    with pytest.raises(StaleLeaseError, match="ended before its blocks were read"):
        reader.fetch(port.source, range(2, 3), port.grants[NAME])


def test_a_lease_that_ends_in_the_middle_of_a_read_fails_it(port: ShmPort, reader: Reader) -> None:
    """Also when the slot has been given to the next lease already, over the same blocks."""
    port.publish(NAME, range(NUM_BLOCKS))
    fetching = Fetching(reader, port)
    port.sender.release(NAME)
    assert port.idle == [NAME], "nobody waits for a reader"
    port.publish(OTHER, range(NUM_BLOCKS))
    error = fetching.go_on()
    assert isinstance(error, StaleLeaseError)
    assert "ended while blocks 0..99 of 100 were read" in error.message
    reader.fetch(port.source, range(1), port.grants[OTHER])


def test_a_lease_that_shares_blocks_with_one_that_ends_stays_good(port: ShmPort, reader: Reader) -> None:
    """Prompts that begin alike lend the same blocks."""
    port.publish(NAME, range(NUM_BLOCKS))
    port.publish(OTHER, range(NUM_BLOCKS))
    fetching = Fetching(reader, port)
    port.sender.release(OTHER)
    assert fetching.go_on() is None


def test_a_lease_that_grows_in_the_middle_of_a_read_stays_good(port: ShmPort, reader: Reader) -> None:
    port.publish(NAME, range(NUM_BLOCKS))
    fetching = Fetching(reader, port)
    port.publish(NAME, [0, 1])
    assert fetching.go_on() is None


def test_a_read_that_is_stopped_ends_between_blocks(port: ShmPort, reader: Reader) -> None:
    port.publish(NAME, range(NUM_BLOCKS))
    fetching = Fetching(reader, port)
    fetching.read.stop()
    assert isinstance(fetching.go_on(), ReadStoppedError)
    assert reader.memory.read_view(GATED_BLOCK - 1)[0] == GATED_BLOCK
    assert not any(reader.memory.read_view(GATED_BLOCK))
    read = Read()
    read.stop()
    with pytest.raises(ReadStoppedError):
        reader.fetch(port.source, range(1), port.grants[NAME], read)


@pytest.mark.parametrize("position", [0, 1])
def test_nothing_can_be_written_through_what_a_reader_gets(port: ShmPort, position: int) -> None:
    """Law 2: neither by a writable map, nor by a write, nor by opening the file again, nor by truncating it."""
    given = descriptors_of(port)
    try:
        for flags in (os.O_RDONLY, os.O_RDWR):
            again = os.open(f"/proc/self/fd/{given[position]}", flags)
            try:
                with pytest.raises(PermissionError):
                    mmap.mmap(again, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                with pytest.raises(OSError, match=r"Bad file descriptor|not permitted"):
                    os.write(again, b"x")
                with pytest.raises(OSError, match=r"Invalid argument|not permitted"):
                    os.ftruncate(again, 0)
            finally:
                os.close(again)
    finally:
        for descriptor in given:
            os.close(descriptor)
    port.memory.fill(0, b"the owner still writes")


def test_a_guessed_token_is_refused(port: ShmPort, reader: Reader) -> None:
    with pytest.raises(KvbatonError, match="no control link stands behind this connection"):
        reader.fetch(
            Source("p", "boot", port.sender.address, "guessed", "shm"), range(1), port.publish(NAME, [6])
        )


def test_a_session_that_ends_ends_its_connection(port: ShmPort, reader: Reader) -> None:
    port.publish(NAME, [6])
    reader.fetch(port.source, range(1), port.grants[NAME])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as later:
        later.settimeout(30)
        later.connect(port.sender.address)
        prove_reading(later, Source("p", "boot", port.sender.address, TOKEN, "shm"))
        for descriptor in socket.recv_fds(later, 1, NUM_DESCRIPTORS)[1]:
            os.close(descriptor)
        port.sessions.end(TOKEN)
        while later.recv(4096):
            pass  # it is closed after the reader's
    with pytest.raises(KvbatonError) as caught:
        reader.fetch(port.source, range(1), port.grants[NAME])
    assert caught.value.kind == "peer_unreachable"


def test_the_source_of_a_restarted_sender_leads_nowhere(
    port: ShmPort, reader: Reader, tmp_path: Path
) -> None:
    """Another boot has another path: the old source leads nowhere, not to the new one's bytes."""
    port.publish(NAME, [6])
    reader.fetch(port.source, range(1), port.grants[NAME])
    port.sender.close()
    restarted = ShmPort(tmp_path, "another-boot")
    try:
        restarted.publish(NAME, [9])
        for _ in range(2):
            with pytest.raises(KvbatonError) as caught:
                reader.fetch(port.source, range(1), port.grants[NAME])
            assert caught.value.kind == "peer_unreachable"
        reader.fetch(restarted.source, range(1), restarted.grants[NAME])
        assert reader.first_bytes(1) == [10]
    finally:
        restarted.sender.close()


def test_closing_the_sender_in_the_middle_of_a_read_fails_it(port: ShmPort, reader: Reader) -> None:
    """It ends its leases, and its socket: the next read does not even begin."""
    port.publish(NAME, range(NUM_BLOCKS))
    fetching = Fetching(reader, port)
    port.sender.close()
    port.sender.close()
    error = fetching.go_on()
    assert isinstance(error, StaleLeaseError)
    assert "ended while blocks 0..99 of 100 were read" in error.message
    with pytest.raises(PeerUnreachableError, match="worker p closed its shm socket"):
        reader.fetch(port.source, range(1), port.grants[NAME])


@pytest.mark.parametrize("how", ["close", "forget"])
def test_forgetting_or_closing_in_the_middle_of_a_read_fails_it(
    port: ShmPort, reader: Reader, how: str
) -> None:
    """The pool is unmapped only when it is not in use."""
    port.publish(NAME, range(NUM_BLOCKS))
    fetching = Fetching(reader, port)
    reader.receiver.close() if how == "close" else reader.receiver.forget(port.source)
    error = fetching.go_on()
    assert isinstance(error, TransferError)
    assert "the link to worker p is gone" in error.message
    if how == "close":
        with pytest.raises(TransferError, match="the receiver is closed"):
            reader.fetch(port.source, range(1), port.grants[NAME])


def num_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_fifty_links_leave_no_descriptor(port: ShmPort, tmp_path: Path) -> None:
    """Neither good ones, nor refused ones, nor ones that a closed receiver leaves."""
    port.publish(NAME, [6])
    before, reader = num_descriptors(), Reader()
    for number in range(50):
        token = f"token-{number}"
        port.sessions.begin(token)
        source = Source("p", "boot", port.sender.address, token, "shm")
        reader.fetch(source, range(1), port.grants[NAME])
        if number % 2:
            reader.receiver.forget(source)
        with pytest.raises(KvbatonError):
            reader.fetch(
                Source("p", "boot", port.sender.address, "guessed", "shm"), range(1), port.grants[NAME]
            )
    reader.receiver.close()
    for number in range(50):
        port.sessions.end(f"token-{number}")
    port.sender.close()
    del reader
    assert num_descriptors() < before, "what the sender held is gone as well"
    assert list(tmp_path.iterdir()) == []


def test_unauthenticated_connections_cannot_displace_readers(port: ShmPort, reader: Reader) -> None:
    """The oldest of too many unauthenticated connections is closed."""
    port.publish(NAME, [6])
    unauthenticated = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(80)]
    try:
        for sock in unauthenticated:
            sock.settimeout(30)
            sock.connect(port.sender.address)
        assert unauthenticated[0].recv(1) == b""
        reader.fetch(port.source, range(1), port.grants[NAME])
    finally:
        for sock in unauthenticated:
            sock.close()


@pytest.mark.parametrize("noise", [b"\xff" * 200, as_frame(b"\xc1\xc1\xc1")])
def test_noise_ends_its_own_connection_only(port: ShmPort, reader: Reader, noise: bytes) -> None:
    port.publish(NAME, [6])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(30)
        sock.connect(port.sender.address)
        sock.sendall(noise)
        try:
            assert sock.recv(1) == b""
        except ConnectionResetError:
            assert noise
    reader.fetch(port.source, range(1), port.grants[NAME])


def test_two_sources_are_read_at_the_same_time(port: ShmPort, reader: Reader, tmp_path: Path) -> None:
    """One read is held in its middle; another source is read by another thread meanwhile."""
    other = ShmPort(tmp_path, "other-boot")
    try:
        port.publish(NAME, range(NUM_BLOCKS))
        other.publish(NAME, [9])
        fetching = Fetching(reader, port)
        target = ByteMemory(LAYOUT, 1)
        reader.receiver.fetch(
            other.source, ReadRequest(NAME, 0, 1, other.grants[NAME]), [target.write_view(0)], Read()
        )
        assert target.read_view(0)[0] == 10
        assert fetching.go_on() is None
    finally:
        other.sender.close()


class PrivateMemory(ByteMemory):
    """A pool that no other process can map."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, 2)
        self.memfd = None


def test_a_pool_that_cannot_be_mapped_is_not_offered(tmp_path: Path, reader: Reader) -> None:
    port = ShmPort(tmp_path, memory=PrivateMemory())
    try:
        assert port.sender.why_not_offered == "the KV pool is not in memory that another process can map"
        with pytest.raises(KvbatonError, match="refused to share its pool: the KV pool is not in memory"):
            reader.fetch(port.source, range(1), ())
        senders = Senders({"shm": port.sender})
        assert senders.offers() == []
        assert senders.publish(NAME, [0]) == ()
    finally:
        port.sender.close()


def test_the_socket_of_a_dead_process_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    stale = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(stale))
    living = ShmPort(tmp_path, "living")
    another = ShmPort(tmp_path, "another")
    try:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["another.sock", "living.sock"]
    finally:
        living.sender.close()
        another.sender.close()


def test_where_the_system_cannot_do_it_the_reason_is_said() -> None:
    words = "^transport shm is not possible here: it needs Linux, and this is darwin; choose auto or tcp$"
    with pytest.raises(SettingError, match=words):
        check_supported("darwin")
    check_supported("linux")
