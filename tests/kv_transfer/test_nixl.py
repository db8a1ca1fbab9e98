"""``nixl`` with the real library, two agents in one process: right bytes, or a clear refusal."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from contract.errors import SettingError, TransferError, WorkerLostError
from kv_transfer.framing import write_frame
from kv_transfer.leases import Sessions
from kv_transfer.testing import ByteMemory
from kv_transfer.transport import (
    BlockViews,
    LeaseName,
    RangeGrant,
    Read,
    ReadRequest,
    ReadStoppedError,
    Source,
    StaleLeaseError,
    address_of,
)
from kv_transfer.transports.data_port import DataPort, Visit
from kv_transfer.transports.nixl_library import load, why_missing
from kv_transfer.transports.nixl_memory import HostMemory, Region
from kv_transfer.transports.nixl_owner import NixlOwner
from kv_transfer.transports.nixl_receiver import agent_name
from kv_transfer.transports.nixl_sender import NixlSender
from kv_transfer.transports.nixl_wire import MAX_NIXL_FRAME_BYTES, NixlWelcome, encode_blocks
from kv_transfer.transports.registry import auto_names
from kv_transfer.transports.settings import has_nvidia_gpu, has_rdma_device, interface_of
from kv_transfer.transports.tcp_wire import DataStatus
from tests.kv_transfer.nixl_port import (
    BEFORE_POST,
    BEHIND_LAST_BYTE,
    LAYOUT,
    NAME,
    NUM_BLOCKS,
    TOKEN,
    HookedRead,
    NixlPort,
    Reader,
    context_for,
)


@pytest.fixture
def port() -> Iterator[NixlPort]:
    made = NixlPort()
    made.sender.publish(NAME, range(NUM_BLOCKS))
    yield made
    made.sender.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


def test_scattered_blocks_arrive_where_they_belong(port: NixlPort, reader: Reader) -> None:
    name, lent = LeaseName("scattered", 0, "l"), random.Random(3).sample(range(NUM_BLOCKS), 50)
    target = random.Random(4).sample(range(NUM_BLOCKS), 40)
    port.sender.publish(name, lent)
    reader.fetch(port.source, range(5, 45), target, name=name)
    assert all(reader.holds(to, lent[number] + 1) for number, to in enumerate(target, 5))
    untouched = set(range(NUM_BLOCKS)) - set(target)
    assert all(reader.holds(block_id, 0) for block_id in untouched)


def test_blocks_are_counted_in_the_lease_not_in_the_pool(port: NixlPort, reader: Reader) -> None:
    name = LeaseName("other", 0, "l")
    port.sender.publish(name, [70, 3])
    port.sender.publish(name, [55])
    reader.fetch(port.source, range(1, 3), name=name)
    assert (reader.holds(0, 4), reader.holds(1, 56)) == (True, True)
    for blocks in (range(3, 4), range(2, 4)):
        with pytest.raises(StaleLeaseError, match="block 3 of transfer other is not readable; 3 blocks are"):
            reader.fetch(port.source, blocks, name=name)


def test_memory_that_is_not_the_pools_is_read_into_as_well(port: NixlPort, reader: Reader) -> None:
    """By way of registered memory: more blocks than that holds at once."""
    elsewhere = HostMemory(LAYOUT.block_bytes, NUM_BLOCKS)
    views = [elsewhere.block(number) for number in range(NUM_BLOCKS)]
    reader.receiver.fetch(port.source, ReadRequest(NAME, 0, NUM_BLOCKS), views, Read())
    assert [view[-1] for view in views] == [number + 1 for number in range(NUM_BLOCKS)]


def test_a_lease_that_is_over_or_never_was_is_refused(port: NixlPort, reader: Reader) -> None:
    with pytest.raises(StaleLeaseError, match="is over or was never given"):
        reader.fetch(port.source, range(1), name=LeaseName("t", 1, "lease"))
    port.sender.release(NAME)
    assert port.idle == [NAME]
    with pytest.raises(StaleLeaseError, match="is over or was never given"):
        reader.fetch(port.source, range(1))


def test_a_lease_that_ends_behind_the_last_byte_makes_the_read_worthless(
    port: NixlPort, reader: Reader
) -> None:
    """Nobody at the sender noticed the read; the second question does."""
    reader.receiver.probe(port.source, Read())
    read = HookedRead(BEHIND_LAST_BYTE, lambda: port.sender.release(NAME))
    with pytest.raises(StaleLeaseError, match="ended while 5 blocks were read from worker p"):
        reader.fetch(port.source, range(5), read=read)
    assert reader.holds(4, 5), "the bytes had landed"
    port.sender.publish(NAME, [9])
    reader.fetch(port.source, range(1))
    assert reader.holds(0, 10)


def granted(*block_ids: int) -> tuple[RangeGrant, ...]:
    """What the control link would have brought of a lease's first blocks."""
    return (RangeGrant(0, len(block_ids), {"nixl": encode_blocks(block_ids)}),)


def test_a_read_that_begins_before_the_sender_has_answered_counts_only_with_its_answers(
    port: NixlPort, reader: Reader
) -> None:
    """Law 3: the lease may be over before, or end behind the last byte, or lend other blocks; the connection stays."""
    name, over = LeaseName("u", 0, "l"), LeaseName("t", 1, "l")
    port.sender.publish(name, [70, 3])
    reader.fetch(port.source, range(2), name=name, grants=granted(70, 3))
    assert (reader.holds(0, 71), reader.holds(1, 4)) == (True, True)
    with pytest.raises(StaleLeaseError, match="ended while 1 blocks were read from worker p"):
        reader.fetch(port.source, range(1), name=over, grants=granted(70))
    reader.fetch(port.source, range(1, 2), name=name, grants=granted(70, 3))
    assert reader.holds(0, 4)
    with pytest.raises(TransferError, match="lends other blocks than it granted"):
        reader.fetch(port.source, range(2), name=name, grants=granted(70, 4))
    with pytest.raises(StaleLeaseError, match="block 2 of transfer u is not readable"):
        reader.fetch(port.source, range(2, 3), name=name, grants=granted(70, 3))
    with pytest.raises(TransferError, match="is not in its pool"):
        reader.fetch(port.source, range(1), name=name, grants=granted(NUM_BLOCKS))
    read = HookedRead(BEHIND_LAST_BYTE, lambda: port.sender.release(name))
    with pytest.raises(StaleLeaseError, match="ended while 2 blocks were read"):
        reader.fetch(port.source, range(2), read=read, name=name, grants=granted(70, 3))


@pytest.mark.parametrize("data", [b"", b"\x91\xff", b"\xc0"])
def test_grants_that_are_none_are_refused(port: NixlPort, reader: Reader, data: bytes) -> None:
    with pytest.raises(TransferError, match="malformed grant"):
        reader.fetch(port.source, range(1), grants=(RangeGrant(0, 1, {"nixl": data}),))
    with pytest.raises(TransferError, match="granted other blocks than it published"):
        reader.fetch(port.source, range(1), grants=(RangeGrant(0, 2, {"nixl": encode_blocks([1])}),))


def test_a_stopped_read_ends_between_its_parts(port: NixlPort, reader: Reader) -> None:
    reader.receiver.probe(port.source, Read())
    read = HookedRead(BEFORE_POST, lambda: read.stop())
    with pytest.raises(ReadStoppedError):
        reader.fetch(port.source, range(2), read=read)
    assert reader.holds(0, 0)
    with pytest.raises(ReadStoppedError):
        reader.fetch(port.source, range(2), read=read)
    reader.fetch(port.source, range(2))
    assert reader.holds(1, 2)


def test_a_guessed_token_and_an_ended_session_are_refused(port: NixlPort, reader: Reader) -> None:
    with pytest.raises(WorkerLostError, match="refused a data connection: no control link stands"):
        reader.fetch(replace(port.source, token="guessed"), range(1))
    reader.fetch(port.source, range(1))
    port.sessions.end(TOKEN)
    with pytest.raises(WorkerLostError, match="closed its data connection"):
        reader.fetch(port.source, range(1))


def test_the_library_is_driven_only_while_something_is_read(port: NixlPort, reader: Reader) -> None:
    """An agent at rest costs nothing, also where a reader stays connected, or was refused."""
    reader.fetch(port.source, range(2))
    assert (port.owner.is_driving(), reader.owner.is_driving()) == (False, False)
    with pytest.raises(StaleLeaseError):
        reader.fetch(port.source, range(NUM_BLOCKS, NUM_BLOCKS + 1))
    assert port.owner.is_driving() is False
    seen: list[bool] = []
    reader.fetch(
        port.source, range(1), read=HookedRead(BEFORE_POST, lambda: seen.append(port.owner.is_driving()))
    )
    assert seen == [True]


def test_two_sessions_share_an_agent_and_the_last_one_forgets_it(port: NixlPort, reader: Reader) -> None:
    """As when a control link breaks and comes up again while the old one's reads are not terminal."""
    port.sessions.begin("second")
    second = replace(port.source, token="second")
    reader.fetch(port.source, range(1))
    reader.fetch(second, range(1, 2))
    reader.receiver.forget(port.source)
    reader.fetch(second, range(2, 3))
    reader.receiver.forget(second)
    reader.fetch(second, range(3, 4))
    assert reader.holds(0, 4)


def test_a_pool_with_other_blocks_is_refused(reader: Reader) -> None:
    small = ByteMemory(msgspec.structs.replace(LAYOUT, block_size=8), NUM_BLOCKS)
    port = NixlPort("small", small)
    try:
        port.sender.publish(NAME, [0])
        with pytest.raises(TransferError, match="has 262144 bytes, not 524288"):
            reader.fetch(port.source, range(1))
    finally:
        port.sender.close()


def test_after_the_agent_is_closed_nothing_is_read(port: NixlPort, reader: Reader) -> None:
    reader.fetch(port.source, range(1))
    reader.close()
    reader.close()
    with pytest.raises(TransferError, match="closed"):
        reader.fetch(port.source, range(1))


def lying(port: NixlPort, lie: Callable[[NixlWelcome], NixlWelcome]) -> DataPort:
    """A data port that welcomes with something else than the truth about ``port``'s pool."""
    nonce = HostMemory(64, 1)
    other = NixlOwner(load("127.0.0.1"), agent_name("liar"))
    pool = HostMemory(LAYOUT.block_bytes, 4)
    truth = NixlWelcome(
        DataStatus.OK,
        agent=other.register(pool.region, nonce.region),
        address=pool.region.address,
        block_bytes=LAYOUT.block_bytes,
        num_blocks=4,
        nonce_address=nonce.region.address,
        nonce=bytes(64),
    )

    def talk(visit: Visit) -> None:
        assert nonce and pool, "alive as long as somebody may read them"
        other.begin_serving()
        write_frame(visit.sock, lie(truth), MAX_NIXL_FRAME_BYTES)
        visit.sock.recv(1)
        other.close()

    return DataPort(context_for("liar", port.sessions, []), "kv-liar", talk)


@pytest.mark.parametrize(
    ("lie", "boot_id", "words"),
    [
        (
            lambda welcome: msgspec.structs.replace(welcome, nonce=b"x" * 64),
            "liar",
            "reads other memory than that of worker p",
        ),
        (
            lambda welcome: msgspec.structs.replace(welcome, agent=b"garbage"),
            "liar",
            "adding kvbaton-liar failed",
        ),
        (lambda welcome: msgspec.structs.replace(welcome, address=0), "liar", "are no memory"),
        (lambda welcome: msgspec.structs.replace(welcome, block_bytes=2**62), "liar", "are no memory"),
        (lambda welcome: msgspec.structs.replace(welcome, num_blocks=2**20), "liar", "failed"),
        (lambda welcome: welcome, "another", "is kvbaton-liar; it should be kvbaton-another"),
        (
            lambda welcome: NixlWelcome(DataStatus.DENIED, "no pool"),
            "liar",
            "lends nothing over nixl: no pool",
        ),
    ],
    ids=["nonce", "metadata", "null", "huge", "unregistered", "stranger", "denied"],
)
def test_a_welcome_that_is_not_true_is_refused(
    port: NixlPort, reader: Reader, lie: Callable[[NixlWelcome], NixlWelcome], boot_id: str, words: str
) -> None:
    liar = lying(port, lie)
    try:
        source = Source("p", boot_id, liar.address, TOKEN, "nixl")
        with pytest.raises(TransferError, match=words):
            reader.receiver.probe(source, Read())
    finally:
        liar.close()
    reader.fetch(port.source, range(1))


def test_views_are_known_as_blocks_of_the_pool_or_not_at_all() -> None:
    """Many at once by their numbers, single ones by their addresses."""
    pool, other = memoryview(bytearray(4096)), memoryview(bytearray(4096))
    region = Region(address_of(pool), 512, 8)
    assert region.find(BlockViews(pool, 512, [3, 1])) == [3, 1]
    assert region.find(list(BlockViews(pool, 512, [3, 1]))) == [3, 1]
    assert region.find(BlockViews(other, 512, [3])) is None
    assert region.find(BlockViews(pool, 256, [3])) is None
    assert region.find([pool[:512], other[:512]]) is None
    assert region.find([pool[256:768]]) is None


@pytest.mark.parametrize(("can_be_best", "names"), [(True, ("shm", "nixl", "tcp")), (False, ("shm", "tcp"))])
def test_auto_prefers_it_to_tcp_only_where_it_may_be_faster(
    can_be_best: bool, names: tuple[str, ...]
) -> None:
    assert auto_names(can_be_best) == names


def test_under_auto_a_pool_in_host_memory_without_an_rdma_card_is_not_offered() -> None:
    """What the machine may have is known before, where the pool lies only now."""
    owner = NixlOwner(load("127.0.0.1"), agent_name("auto"))
    sender = NixlSender(replace(context_for("auto", Sessions(), []), is_auto=True), owner)
    assert sender.why_not_offered == "the pool is not allocated yet"
    sender.start(ByteMemory(LAYOUT, 4))
    expected = (
        None
        if has_rdma_device()
        else "the KV pool is in host memory and there is no RDMA card, so tcp is faster"
    )
    assert sender.why_not_offered == expected
    sender.close()
    sender.close()


def test_the_devices_of_a_machine(tmp_path: Path) -> None:
    assert has_rdma_device(tmp_path / "none") is False
    assert has_rdma_device(tmp_path) is False
    (tmp_path / "mlx5_0").mkdir()
    assert has_rdma_device(tmp_path) is True
    assert has_nvidia_gpu(tmp_path / "version") is False


@pytest.mark.parametrize(("host", "interface"), [("127.0.0.1", "lo"), ("localhost", "lo"), ("0.0.0.0", None)])
def test_the_library_keeps_to_the_interface_of_the_workers_host(host: str, interface: str | None) -> None:
    assert interface_of(host) == interface


def test_a_missing_library_says_what_to_install() -> None:
    with pytest.raises(SettingError, match=r"pip install 'kvbaton\[nixl\]'") as caught:
        load("127.0.0.1", ("no_such_library._api", "nor_this._api"))
    assert caught.value.param == "transport"
    assert why_missing(("no_such_library._api",)) == caught.value.message
    assert why_missing(("no_such_library._api", "json")) is None


def test_a_broken_library_says_so() -> None:
    with pytest.raises(SettingError, match="cannot be loaded"):
        load("127.0.0.1", ("json.no_such_module",))
