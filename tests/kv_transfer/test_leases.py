"""Lent blocks are released by expiry and by the receiver's death, and never while they are read."""

import socket
import threading

import msgspec
import pytest

from contract.identity import Role
from contract.layout import KVLayout
from kv_transfer.links.framing import parse_address, read_frame, write_frame
from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, ReadStoppedError, Source, StaleLeaseError
from kv_transfer.transports.data_handshake import MAX_DATA_FRAME_BYTES, DataReply, DataStatus, reply_frame
from kv_transfer.transports.leases import LeaseBook, Sessions
from kv_transfer.transports.tcp.transport import OK_FRAME, TcpReceiver, TcpSender
from tests.kv_transfer.builders import LAYOUT, TOKENS, Pair, Sides, pair_of, prompt_of, settings_for, worker
from tests.kv_transfer.fakes import ByteMemory, GatedMemory, context_of
from tests.kv_transfer.greetings import prove_lending, prove_reading


def test_a_finished_prompt_that_nobody_fetches_expires() -> None:
    """It expires lease_seconds after its completion, once; a late fetch gets an error."""
    with pair_of(Sides(prefill={"lease_seconds": 0.3})) as pair:
        prefill, decode = pair.prefill.driver, pair.decode.driver
        send = pair.send_request("r", prompt_of(2))
        prefill.send_all(send, [0, 1], TOKENS)
        prefill.wait_for(lambda: prefill.sent == [send.key], "sent")
        assert pair.prefill.count("leases_expired_total") == 1
        fetch = pair.fetch_request("r", prompt_of(2))
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: decode.failed, "failed")
        assert decode.failed[fetch.key].kind == "deadline"


def test_heartbeats_renew_a_lease() -> None:
    """A receiver that is slow to reserve but alive keeps its lease well beyond lease_seconds.

    The patient side pings as often as the impatient one needs.
    """
    sides = Sides(prefill={"lease_seconds": 0.6}, decode={"peer_timeout_seconds": 0.5})
    with pair_of(sides) as pair:
        prefill, decode = pair.prefill.driver, pair.decode.driver
        send, fetch = pair.send_request("r", prompt_of(2)), pair.fetch_request("r", prompt_of(2))
        decode.receiver.start_fetch(fetch)
        prefill.send_all(send, [0, 1], TOKENS)
        with pytest.raises(TimeoutError):
            prefill.wait_for(lambda: prefill.sent, "expiry", timeout_seconds=1.8)
        decode.step()
        assert decode.failed == {}
        decode.receiver.receive_into(fetch.key, [10, 11], 0)
        decode.wait_for(lambda: decode.received, "received")


@pytest.mark.parametrize("when", ["parked", "published", "complete"])
def test_the_receivers_death_frees_its_leases(when: str) -> None:
    with worker(settings_for("p", Role.PREFILL)) as prefill:
        driver = prefill.driver
        with worker(settings_for("d", Role.DECODE)) as decode:
            pair = Pair(prefill, decode)
            send, fetch = pair.send_request("r", prompt_of(2)), pair.fetch_request("r", prompt_of(2))
            decode.driver.receiver.start_fetch(fetch)
            if when == "parked":
                decode.driver.wait_for(lambda: prefill.count("transfers_parked") == 1, "parked")
            else:
                driver.sender.open_send(send, [0, 1], 0)
                driver.sender.publish(send.key, 4 if when == "published" else 8)
                driver.step()
                decode.driver.wait_for(lambda: decode.driver.published, "published")
            if when == "complete":
                driver.sender.finish_send(send.key, TOKENS)
        driver.wait_for(
            lambda: prefill.count("leases_active") + prefill.count("transfers_parked") == 0, "freed"
        )
        if when == "published":
            assert driver.sent == [], "the scheduler has not finished with it"
            driver.sender.abandon_send(send.key, "cancelled", "aborted")
        if when != "parked":
            driver.wait_for(lambda: driver.sent == [send.key], "sent")
            assert prefill.count("leases_expired_total") == 1


def test_nothing_is_reported_sent_while_the_data_thread_digests() -> None:
    """An abort during the digest of a published range waits for the reading thread."""
    memory = GatedMemory(LAYOUT, 64)
    with pair_of(memory=memory) as pair:
        prefill = pair.prefill.driver
        send = pair.send_request("r", prompt_of(3))
        memory.gated_block = 1
        prefill.sender.open_send(send, [0, 1, 2], 0)
        prefill.sender.publish(send.key, 12)
        prefill.step()
        assert memory.is_waiting.wait(30)
        prefill.sender.abandon_send(send.key, "cancelled", "aborted")
        prefill.step()
        assert prefill.sent == []
        memory.gate.set()
        prefill.wait_for(lambda: prefill.sent == [send.key], "sent")


NAME = LeaseName("t", 0, "lease")
SMALL = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32")


class DataPort:
    """A TcpSender with a session, and a receiver for it."""

    def __init__(self) -> None:
        self.sessions, self.idle = Sessions(), list[LeaseName]()
        self.sender = TcpSender(context_of("b", self.sessions, self.idle.append))
        self.sessions.begin("token")
        self.receiver = TcpReceiver(30.0)
        self.memory, self.target = ByteMemory(SMALL, 8), ByteMemory(SMALL, 8)
        self.sender.start(self.memory)
        for block_id in range(8):
            self.memory.fill(block_id, bytes([block_id + 1]))

    def fetch(self, blocks: range, name: LeaseName = NAME, token: str = "token") -> None:
        source = Source("p", "b", self.sender.address, token)
        views = [self.target.write_view(number) for number in range(len(blocks))]
        self.receiver.fetch(source, ReadRequest(name, blocks.start, len(blocks)), views, Read())

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


@pytest.fixture
def port() -> "DataPort":
    return DataPort()


@pytest.mark.parametrize("blocks", [range(2, 3), range(1, 3), range(99, 100)])
def test_nobody_reads_outside_a_lease(port: DataPort, blocks: range) -> None:
    """Blocks are relative to the transfer and checked against what was published."""
    try:
        port.sender.publish(NAME, [6, 7])
        port.fetch(range(1, 2))
        assert port.target.read_view(0)[0] == 8
        with pytest.raises(StaleLeaseError, match="refused as stale"):
            port.fetch(blocks)
        assert port.target.read_view(0)[0] == 8
        port.fetch(range(1))
    finally:
        port.close()


def test_stale_leases_tokens_and_attempts_are_refused(port: DataPort) -> None:
    try:
        port.sender.publish(NAME, [6, 7])
        for other in (LeaseName("t", 1, "lease"), LeaseName("t", 0, "old"), LeaseName("u", 0, "lease")):
            with pytest.raises(StaleLeaseError, match="refused as stale"):
                port.fetch(range(1), other)
        port.sender.release(NAME)
        assert port.idle == [NAME]
        with pytest.raises(StaleLeaseError, match=r"blocks 0\.\.0 of transfer t"):
            port.fetch(range(1))
        with pytest.raises(Exception, match="no control link stands behind"):
            port.fetch(range(1), token="guessed")
    finally:
        port.close()


def test_a_session_that_ends_cuts_its_data_connections(port: DataPort) -> None:
    try:
        port.sender.publish(NAME, [6, 7])
        port.fetch(range(1))
        port.sessions.end("token")
        with pytest.raises(Exception, match=r"short read|failed|closed|no control link"):
            port.fetch(range(1))
    finally:
        port.close()


class SlowServer:
    """Answers one data connection by hand."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"

    def serve(self, content: bytes, verdict: DataStatus | None, then: threading.Event | None = None) -> None:
        with self.listener, self.listener.accept()[0] as sock:
            prove_lending(sock, "token", "tcp")
            sock.sendall(OK_FRAME)
            read_frame(sock, ReadRequest, MAX_DATA_FRAME_BYTES)
            sock.sendall(OK_FRAME + content)
            if then is not None:
                then.wait()
            if verdict is not None:
                sock.sendall(reply_frame(verdict))


@pytest.mark.parametrize(
    ("num_bytes", "verdict", "words"),
    [
        (SMALL.block_bytes + 5, None, "short read in block 3 of transfer t"),
        (2 * SMALL.block_bytes, DataStatus.STALE, "blocks 2..3 of transfer t .* refused as stale"),
        (2 * SMALL.block_bytes, None, "short read after blocks 2..3"),
    ],
)
def test_a_read_counts_only_with_its_last_byte_inside_the_lease(
    num_bytes: int, verdict: DataStatus | None, words: str
) -> None:
    """A connection that ends early names the block; a lease that ended during the read makes it worthless (law 3)."""
    server = SlowServer()
    thread = threading.Thread(target=server.serve, args=(b"x" * num_bytes, verdict))
    thread.start()
    receiver, target = TcpReceiver(30.0), ByteMemory(SMALL, 2)
    try:
        with pytest.raises(Exception, match=words):
            receiver.fetch(
                Source("p", "b", server.address, "token"),
                ReadRequest(NAME, 2, 2),
                [target.write_view(0), target.write_view(1)],
                Read(),
            )
    finally:
        thread.join()
        receiver.close()


def test_a_read_that_is_stopped_in_its_middle_is_terminal() -> None:
    """Half of the bytes have landed; after the stop the rest cannot."""
    server, go_on = SlowServer(), threading.Event()
    half = b"x" * SMALL.block_bytes
    serving = threading.Thread(target=server.serve, args=(half, None, go_on))
    receiver, target, read = TcpReceiver(30.0), ByteMemory(SMALL, 2), Read()
    outcome: list[BaseException] = []

    def fetch() -> None:
        views = [target.write_view(0), target.write_view(1)]
        try:
            receiver.fetch(Source("p", "b", server.address, "token"), ReadRequest(NAME, 0, 2), views, read)
        except ReadStoppedError as error:
            outcome.append(error)

    reading = threading.Thread(target=fetch)
    serving.start()
    reading.start()
    last = SMALL.block_bytes - 1
    while target.read_view(0)[last] == 0:
        reading.join(0.01)
    read.stop()
    reading.join()
    go_on.set()
    serving.join()
    receiver.close()
    assert len(outcome) == 1
    assert not any(target.read_view(1))


def test_a_read_that_was_stopped_before_never_starts(port: DataPort) -> None:
    try:
        read = Read()
        read.stop()
        with pytest.raises(ReadStoppedError):
            port.receiver.fetch(
                Source("p", "b", port.sender.address, "token"),
                ReadRequest(NAME, 0, 1),
                [port.target.write_view(0)],
                read,
            )
        assert parse_address(port.sender.address)[0] == "127.0.0.1"
    finally:
        port.close()


def test_a_receiver_that_stops_reading_cannot_hold_a_released_lease(port: DataPort) -> None:
    """The sender is stuck in the middle of a block of 32 MiB; the release ends that read."""
    idle = threading.Event()
    huge = msgspec.structs.replace(SMALL, head_dim=1024, block_size=4096)
    context = context_of("b", port.sessions, lambda _: idle.set(), read_timeout_seconds=300.0)
    sender = TcpSender(context)
    try:
        sender.start(ByteMemory(huge, 1))
        sender.publish(NAME, [0])
        with socket.create_connection(parse_address(sender.address)) as sock:
            prove_reading(sock, Source("p", "b", sender.address, "token"))
            read_frame(sock, DataReply, MAX_DATA_FRAME_BYTES)
            write_frame(sock, ReadRequest(NAME, 0, 1), MAX_DATA_FRAME_BYTES)
            assert read_frame(sock, DataReply, MAX_DATA_FRAME_BYTES).status is DataStatus.OK
            assert sock.recv(1) == b"\0"
            sender.release(NAME)
            assert idle.wait(30)
    finally:
        sender.close()
        port.close()


def test_a_release_right_after_a_read_does_not_cut_the_next_one(port: DataPort) -> None:
    """One connection serves read, release, read of another lease, many times over."""
    try:
        for number in range(300):
            name = LeaseName("t", 0, f"lease-{number}")
            port.sender.publish(name, [6, 7])
            port.fetch(range(2), name)
            port.sender.release(name)
        assert len(port.idle) == 300
    finally:
        port.close()


def test_a_lease_is_idle_when_its_last_reader_leaves() -> None:
    """Once per revocation, and no read starts after the first."""
    idle: list[LeaseName] = []
    book, interrupted = LeaseBook(idle.append), list[str]()
    book.start(ByteMemory(SMALL, 2))
    book.extend(NAME, [0, 1])
    with book.reading(ReadRequest(NAME, 1, 1), lambda: interrupted.append("one that ended before")):
        pass
    with book.reading(ReadRequest(NAME, 0, 1), lambda: interrupted.append("a running one")):
        book.revoke(NAME)
        assert interrupted == ["a running one"]
        book.revoke(NAME)
        assert idle == []
        with pytest.raises(StaleLeaseError), book.reading(ReadRequest(NAME, 1, 1)):
            pass
        with pytest.raises(StaleLeaseError):
            book.check(NAME)
    assert idle == [NAME, NAME]


def test_a_range_that_was_digested_late_does_not_begin_its_lease_again() -> None:
    """With the numbers of its first blocks it would lend others than those that were announced."""
    book = LeaseBook(lambda _: None)
    book.start(ByteMemory(SMALL, 4))
    book.extend(NAME, [0, 1])
    book.revoke(NAME)
    book.extend(NAME, [2, 3], first_block=2)
    with pytest.raises(StaleLeaseError):
        book.check(NAME)
    with pytest.raises(StaleLeaseError), book.reading(ReadRequest(NAME, 0, 2)):
        pass
