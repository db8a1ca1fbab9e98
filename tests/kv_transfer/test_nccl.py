"""``nccl`` by gloo between real processes: right bytes, or one clear error within its timeout."""

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

import msgspec
import pytest

from contract.errors import KvbatonError, PeerUnreachableError, TransferError
from kv_transfer.protocol.reads import Read, ReadRequest, ReadStoppedError, StaleLeaseError
from kv_transfer.transports.data_handshake import DataStatus
from kv_transfer.transports.nccl.group import GroupPool
from kv_transfer.transports.nccl.transport import NcclPoolInfo, check_info
from tests.kv_transfer.fakes import ByteMemory
from tests.kv_transfer.nccl_port import NcclPort, Reader
from tests.kv_transfer.nixl_port import LAYOUT, NAME, NUM_BLOCKS, TOKEN
from tests.kv_transfer.sender_process import Sender, running_sender
from tests.processes import stop


def sender_process(timeout_seconds: float = 30.0) -> AbstractContextManager[Sender]:
    return running_sender(["tests.kv_transfer.nccl_port", "boot", str(timeout_seconds)], TOKEN, "nccl")


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


@pytest.fixture
def port() -> Iterator[NcclPort]:
    made = NcclPort()
    made.sender.publish(NAME, range(NUM_BLOCKS))
    yield made
    made.sender.close()


def test_all_blocks_cross_two_processes_in_any_order(reader: Reader) -> None:
    with sender_process() as sender:
        reader.fetch(sender.source, range(NUM_BLOCKS))
        assert all(reader.holds(number, NUM_BLOCKS - number) for number in range(NUM_BLOCKS))
        assert sender.release() == {"idle": 1}
        with pytest.raises(StaleLeaseError, match="is over or was never given"):
            reader.fetch(sender.source, range(1))


def test_a_sender_that_dies_is_an_error_and_its_successor_is_read(reader: Reader) -> None:
    with sender_process() as sender:
        reader.fetch(sender.source, range(1))
        sender.process.kill()
        with pytest.raises(PeerUnreachableError):
            reader.fetch(sender.source, range(1, 2))
    with sender_process() as successor:
        reader.fetch(successor.source, range(7, 8))
        assert reader.holds(0, NUM_BLOCKS - 7)


def test_a_silent_sender_fails_the_read_within_its_timeout() -> None:
    """Nothing reaches a block: also what arrives when the sender goes on is dropped."""
    reader = Reader(timeout_seconds=2.0)
    with sender_process() as sender:
        reader.fetch(sender.source, range(1))
        stop(sender.process)
        with pytest.raises(TransferError, match="reading from worker p failed: timed out"):
            reader.fetch(sender.source, range(1, 2))
        sender.process.send_signal(signal.SIGCONT)
        assert sender.release() == {"idle": 1}
        assert reader.holds(0, NUM_BLOCKS)
    reader.close()


def test_a_read_from_a_silent_sender_can_be_stopped(reader: Reader) -> None:
    outcome: list[KvbatonError | None] = []
    read = Read()

    def run() -> None:
        try:
            reader.fetch(sender.source, range(1, 2), read)
            outcome.append(None)
        except KvbatonError as error:
            outcome.append(error)

    with sender_process() as sender:
        reader.fetch(sender.source, range(1))
        stop(sender.process)
        thread = threading.Thread(target=run)
        thread.start()
        read.stop()
        thread.join(20)
        assert isinstance(outcome[0], ReadStoppedError)
        assert reader.holds(0, NUM_BLOCKS)


def test_a_guessed_token_an_ended_session_and_a_block_outside_are_refused(
    port: NcclPort, reader: Reader
) -> None:
    with pytest.raises(PeerUnreachableError, match="refused a data connection: no control link stands"):
        reader.fetch(msgspec.structs.replace(port.source, token="guessed"), range(1))
    with pytest.raises(StaleLeaseError, match="block 100 of transfer t is not readable; 100 blocks are"):
        reader.fetch(port.source, range(NUM_BLOCKS, NUM_BLOCKS + 1))
    reader.fetch(port.source, range(5, 6))
    assert reader.holds(0, 6)
    half = [memoryview(bytearray(LAYOUT.block_bytes // 2))]
    with pytest.raises(TransferError, match="has 524288 bytes, not 262144"):
        reader.receiver.fetch(port.source, ReadRequest(NAME, 0, 1), half, Read())
    reader.fetch(port.source, range(6, 7))
    port.sessions.end(TOKEN)
    with pytest.raises(PeerUnreachableError, match="closed its data connection"):
        reader.fetch(port.source, range(1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "nccl"}, "moves bytes by nccl, this worker by gloo"),
        ({"status": DataStatus.DENIED, "message": "no pool"}, "lends nothing over nccl: no pool"),
    ],
)
def test_pools_that_cannot_be_one_group_are_refused(changes: dict[str, object], words: str) -> None:
    pool = GroupPool(ByteMemory(LAYOUT, 2))
    welcome = NcclPoolInfo(DataStatus.OK, backend="gloo", block_bytes=LAYOUT.block_bytes)
    check_info(welcome, pool, "worker p")
    with pytest.raises(TransferError, match=words):
        check_info(msgspec.structs.replace(welcome, **changes), pool, "worker p")


def test_two_ranks_on_one_gpu_are_refused_with_a_way_out() -> None:
    pool = GroupPool(ByteMemory(LAYOUT, 2))
    pool.backend, pool.device = "nccl", "GPU-1"
    welcome = NcclPoolInfo(DataStatus.OK, backend="nccl", device="GPU-1", block_bytes=LAYOUT.block_bytes)
    with pytest.raises(TransferError, match=r"on the same GPU \(GPU-1\).*choose nixl or shm"):
        check_info(welcome, pool, "worker p")
    check_info(msgspec.structs.replace(welcome, device="GPU-2"), pool, "worker p")
