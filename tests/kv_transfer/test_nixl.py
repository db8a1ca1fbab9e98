"""``nixl`` with the real library, two agents in one process: right bytes, or a clear refusal."""

import random
import threading
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from contract.errors import PeerUnreachableError, TransferError
from kv_transfer.links.framing import write_frame
from kv_transfer.protocol.reads import (
    LeaseName,
    RangeGrant,
    Read,
    ReadRequest,
    ReadStoppedError,
    Source,
    StaleLeaseError,
)
from kv_transfer.transports.data_handshake import DataStatus
from kv_transfer.transports.data_port import Connection, DataPort
from kv_transfer.transports.leases import NUM_SLOTS, SLOT_BYTES, BlockGrant, GenerationTable
from kv_transfer.transports.nixl.agent import ID_TYPE, Region, load
from kv_transfer.transports.nixl.nixl_thread import NixlThread
from kv_transfer.transports.nixl.remote_pool import HostMemory
from kv_transfer.transports.nixl.sender import MAX_NIXL_FRAME_BYTES, NixlPoolInfo, agent_name
from tests.kv_transfer.fakes import ByteMemory
from tests.kv_transfer.nixl_port import (
    BEFORE_POST,
    BEHIND_POST,
    LAYOUT,
    NAME,
    NUM_BLOCKS,
    TOKEN,
    HookedRead,
    NixlPort,
    Reader,
    context_for,
    is_driving,
)
from tests.kv_transfer.watched_nixl import Watch


@pytest.fixture
def port() -> Iterator[NixlPort]:
    made = NixlPort()
    made.publish(NAME, range(NUM_BLOCKS))
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
    grants = port.publish(name, lent)
    reader.fetch(port.source, range(5, 45), grants, target, name=name)
    assert all(reader.holds(to, lent[number] + 1) for number, to in enumerate(target, 5))
    untouched = set(range(NUM_BLOCKS)) - set(target)
    assert all(reader.holds(block_id, 0) for block_id in untouched)


def test_blocks_are_counted_in_the_lease_not_in_the_pool(port: NixlPort, reader: Reader) -> None:
    name = LeaseName("other", 0, "l")
    port.publish(name, [70, 3])
    grants = port.publish(name, [55])
    reader.fetch(port.source, range(1, 3), grants, name=name)
    assert (reader.holds(0, 4), reader.holds(1, 56)) == (True, True)
    for blocks in (range(3, 4), range(2, 4)):
        with pytest.raises(StaleLeaseError, match="block 3 of transfer other is not readable; 3 blocks are"):
            reader.fetch(port.source, blocks, grants, name=name)


def elsewhere(count: int) -> list[memoryview]:
    """Views of memory that is not the reader's pool."""
    memory = HostMemory(LAYOUT.block_bytes, count)
    return [memory.block(number) for number in range(count)]


def test_memory_that_is_not_the_pools_is_read_into_as_well(port: NixlPort, reader: Reader) -> None:
    """By way of registered memory: more blocks than that holds at once."""
    views = elsewhere(NUM_BLOCKS)
    request = ReadRequest(NAME, 0, NUM_BLOCKS, port.grants[NAME])
    reader.receiver.fetch(port.source, request, views, Read())
    assert [view[-1] for view in views] == [number + 1 for number in range(NUM_BLOCKS)]


def test_a_lease_that_is_over_or_never_was_is_refused(port: NixlPort, reader: Reader) -> None:
    """Also when its slot has been given to the next lease, which lends the same block."""
    over = port.grants[NAME]
    port.sender.release(NAME)
    assert port.idle == [NAME]
    for _ in range(2):
        with pytest.raises(StaleLeaseError, match="ended while 1 blocks were read from worker p"):
            reader.fetch(port.source, range(1), over)
        port.publish(LeaseName("next", 0, "l"), range(NUM_BLOCKS))
    with pytest.raises(TransferError, match="without a grant for nixl"):
        reader.fetch(port.source, range(1), ())
    reader.fetch(port.source, range(1), port.publish(LeaseName("third", 0, "l"), [9]))
    assert reader.holds(0, 10)


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def watched(watch: Watch) -> Iterator[Reader]:
    made = Reader(watch.watched())
    yield made
    watch.may_end.set()
    made.close()


def test_a_lease_that_ends_after_the_last_byte_fails_the_read(
    port: NixlPort, watch: Watch, watched: Reader
) -> None:
    """The sender does not notice the read; the lease's generation, read after it, shows the end."""
    watched.receiver.probe(port.source, Read())
    watch.when_done = lambda: port.sender.release(NAME)
    with pytest.raises(StaleLeaseError, match="ended while 5 blocks were read from worker p"):
        watched.fetch(port.source, range(5), port.grants[NAME])
    assert watched.holds(4, 5), "the bytes had landed"
    watch.when_done = lambda: None
    watched.fetch(port.source, range(1), port.publish(LeaseName("next", 0, "l"), [9]))
    assert watched.holds(0, 10)


def test_the_generation_is_read_only_when_the_last_byte_is_there(
    port: NixlPort, watch: Watch, watched: Reader
) -> None:
    """Laws 3 and 4: the library may report the end of a read late, and the lease may end before that."""
    watched.receiver.probe(port.source, Read())
    watch.clear()
    watch.may_end.clear()
    outcome: list[type[BaseException] | None] = []

    def fetch() -> None:
        try:
            watched.fetch(port.source, range(2), port.grants[NAME])
            outcome.append(None)
        except TransferError as error:
            outcome.append(type(error))

    thread = threading.Thread(target=fetch)
    thread.start()
    assert watch.has_posted.wait(30)
    is_driving(watched.nixl_thread)  # answered after all that is posted
    assert watch.seen == [("posted", [0, 1])]
    port.sender.release(NAME)
    watch.may_end.set()
    thread.join(30)
    assert outcome == [StaleLeaseError]
    assert [word for word, _ in watch.seen] == ["posted", "done", "posted", "done"]
    assert watch.seen[2][1] != [0, 1]


def test_a_lease_that_ends_between_two_parts_fails_the_read(port: NixlPort, reader: Reader) -> None:
    """By way of registered memory, which does not hold all blocks at once."""
    reader.receiver.probe(port.source, Read())
    read = HookedRead(BEHIND_POST, lambda: port.sender.release(NAME))
    views = elsewhere(NUM_BLOCKS)
    with pytest.raises(StaleLeaseError, match="ended while 100 blocks were read from worker p"):
        reader.receiver.fetch(port.source, ReadRequest(NAME, 0, NUM_BLOCKS, port.grants[NAME]), views, read)


def test_the_end_of_another_lease_of_the_same_blocks_changes_nothing(port: NixlPort, reader: Reader) -> None:
    other = LeaseName("other", 0, "l")
    port.publish(other, range(NUM_BLOCKS))
    read = HookedRead(BEFORE_POST, lambda: port.sender.release(other))
    reader.receiver.probe(port.source, Read())
    reader.fetch(port.source, range(3), port.grants[NAME], read=read)
    assert reader.holds(2, 3)


def test_a_read_under_two_leases_counts_while_both_last(port: NixlPort, reader: Reader) -> None:
    """A range published anew under another lease of that name."""
    (first,), (second,) = port.publish(LeaseName("a", 0, "l"), [7]), port.publish(LeaseName("b", 0, "l"), [8])
    grants = (first, msgspec.structs.replace(second, first_block=1))
    reader.fetch(port.source, range(2), grants)
    assert (reader.holds(0, 8), reader.holds(1, 9)) == (True, True)
    port.sender.release(LeaseName("a", 0, "l"))
    with pytest.raises(StaleLeaseError, match="ended while 2 blocks were read"):
        reader.fetch(port.source, range(2), grants)
    reader.fetch(port.source, range(1, 2), grants[1:])


def granted(slot: int, block_ids: list[int]) -> bytes:
    """Return a grant as a sender encodes it."""
    return msgspec.msgpack.encode(BlockGrant(slot, 1, np.array(block_ids, ID_TYPE).tobytes()))


def test_a_malformed_or_wrong_grant_is_refused(port: NixlPort, reader: Reader) -> None:
    def range_of(num_blocks: int, data: bytes) -> tuple[RangeGrant, ...]:
        return (RangeGrant(0, num_blocks, {"nixl": data}),)

    for data in (b"", b"\x91\xff", b"\xc0", granted(0, [1])):
        with pytest.raises(TransferError, match="malformed grant"):
            reader.fetch(port.source, range(1), range_of(1, data))
    with pytest.raises(TransferError, match="granted other blocks than it published"):
        reader.fetch(port.source, range(1), range_of(2, granted(1, [1])))
    for block_id in (-1, NUM_BLOCKS, 2**31 - 1):
        with pytest.raises(TransferError, match=f"granted block {block_id} of a pool of 100"):
            reader.fetch(port.source, range(2), range_of(2, granted(1, [1, block_id])))


def test_a_stopped_read_ends_between_its_parts(port: NixlPort, reader: Reader) -> None:
    reader.receiver.probe(port.source, Read())
    read = HookedRead(BEFORE_POST, lambda: read.stop())
    for _ in range(2):
        with pytest.raises(ReadStoppedError):
            reader.fetch(port.source, range(2), port.grants[NAME], read=read)
        assert reader.holds(0, 0)
    reader.fetch(port.source, range(2), port.grants[NAME])
    assert reader.holds(1, 2)


def test_a_guessed_token_and_an_ended_session_are_refused(port: NixlPort, reader: Reader) -> None:
    grants = port.grants[NAME]
    with pytest.raises(PeerUnreachableError, match="refused a data connection: no control link stands"):
        reader.fetch(msgspec.structs.replace(port.source, token="guessed"), range(1), grants)
    reader.fetch(port.source, range(1), grants)
    port.sessions.end(TOKEN)
    with pytest.raises(PeerUnreachableError, match="closed its data connection"):
        reader.fetch(port.source, range(1), grants)


def test_the_library_is_driven_only_while_something_is_read(port: NixlPort, reader: Reader) -> None:
    """An agent at rest costs nothing, also where a reader stays connected, or reads without its help.

    A read that is late asks for help, and the next one may: not all of them are late, however busy the machine.
    """
    seen: list[bool] = []
    reader.receiver.probe(port.source, Read())
    while seen.count(True) < 200 and False not in seen:
        read = HookedRead(BEFORE_POST, lambda: seen.append(is_driving(port.nixl_thread)))
        reader.fetch(port.source, range(2), port.grants[NAME], read=read)
        port.until_resting()
        assert not is_driving(reader.nixl_thread)
    assert False in seen


def test_a_reader_that_can_ask_no_more_is_helped_on(port: NixlPort, reader: Reader) -> None:
    """A read of its may be open: without the sender's thread it might never become terminal."""
    reader.receiver.probe(port.source, Read())
    port.until_resting()
    reader.receiver.forget(port.source)
    port.sender._port.close()  # joins the thread of the connection
    assert is_driving(port.nixl_thread)


def test_two_sessions_share_an_agent_and_the_last_one_forgets_it(port: NixlPort, reader: Reader) -> None:
    """This happens when a control link is replaced while the old one's reads are not terminal."""
    port.sessions.begin("second")
    second, grants = msgspec.structs.replace(port.source, token="second"), port.grants[NAME]
    reader.fetch(port.source, range(1), grants)
    reader.fetch(second, range(1, 2), grants)
    reader.receiver.forget(port.source)
    reader.fetch(second, range(2, 3), grants)
    reader.receiver.forget(second)
    reader.fetch(second, range(3, 4), grants)
    assert reader.holds(0, 4)


def test_two_threads_read_by_one_agent_while_it_is_read_from(port: NixlPort, reader: Reader) -> None:
    """The agent's thread has work now and then, so that reads are posted by it or by their callers."""
    second = NixlPort("second")
    grants, numbers = second.publish(NAME, range(NUM_BLOCKS)[::-1]), range(0, NUM_BLOCKS, 4)

    def fetch_from_second() -> None:
        for number in numbers:
            reader.fetch(
                second.source, range(number, number + 2), grants, [50 + number % 50, 51 + number % 50]
            )

    thread = threading.Thread(target=fetch_from_second)
    thread.start()
    for number in numbers:
        reader.nixl_thread.tell(lambda driver: driver.serve(second))
        reader.fetch(
            port.source, range(number, number + 2), port.grants[NAME], [number % 50, number % 50 + 1]
        )
        assert (reader.holds(number % 50, number + 1), reader.holds(number % 50 + 1, number + 2)) == (
            True,
            True,
        )
        reader.nixl_thread.tell(lambda driver: driver.rest(second))
    thread.join(60)
    assert not thread.is_alive()
    assert all(reader.holds(50 + number % 50, NUM_BLOCKS - number) for number in numbers[-12:])
    second.sender.close()


def test_a_pool_with_other_blocks_is_refused(reader: Reader) -> None:
    small = ByteMemory(msgspec.structs.replace(LAYOUT, block_size=8), NUM_BLOCKS)
    port = NixlPort("small", small)
    try:
        with pytest.raises(TransferError, match="has 262144 bytes, not 524288"):
            reader.fetch(port.source, range(1), port.publish(NAME, [0]))
    finally:
        port.sender.close()


def test_after_the_agent_is_closed_nothing_is_read(port: NixlPort, reader: Reader) -> None:
    reader.fetch(port.source, range(1), port.grants[NAME])
    reader.close()
    reader.close()
    with pytest.raises(TransferError, match="closed"):
        reader.fetch(port.source, range(1), port.grants[NAME])


def lying(port: NixlPort, lie: Callable[[NixlPoolInfo], NixlPoolInfo]) -> DataPort:
    """Open a data port that describes ``port``'s pool wrongly."""
    table = GenerationTable(lambda _: None, ID_TYPE)
    other = NixlThread(load("127.0.0.1"), agent_name("liar"), lambda _thread, _error: None)
    pool = HostMemory(LAYOUT.block_bytes, 4)
    generations = Region(table.address, SLOT_BYTES, NUM_SLOTS)
    truth = NixlPoolInfo(
        DataStatus.OK,
        agent=other.ask(lambda driver: driver.register([pool.region], generations)),
        address=pool.region.address,
        block_bytes=LAYOUT.block_bytes,
        num_blocks=4,
        table_address=table.address,
        nonce=table.nonce,
    )

    def talk(connection: Connection) -> None:
        assert table and pool, "alive as long as somebody may read them"
        other.tell(lambda driver: driver.serve(connection))
        write_frame(connection.sock, lie(truth), MAX_NIXL_FRAME_BYTES)
        connection.sock.recv(1)
        other.close()

    return DataPort(context_for("liar", port.sessions, []), "kv-liar", talk, transport="nixl")


@pytest.mark.parametrize(
    ("lie", "boot_id", "words"),
    [
        (
            lambda welcome: msgspec.structs.replace(welcome, nonce=welcome.nonce ^ 1),
            "liar",
            "reads other memory than that of worker p",
        ),
        (
            lambda welcome: msgspec.structs.replace(welcome, agent=b"garbage"),
            "liar",
            "adding kvbaton-liar failed",
        ),
        (lambda welcome: msgspec.structs.replace(welcome, address=0), "liar", "are not memory"),
        (lambda welcome: msgspec.structs.replace(welcome, table_address=0), "liar", "are not memory"),
        (lambda welcome: msgspec.structs.replace(welcome, block_bytes=2**62), "liar", "are not memory"),
        (lambda welcome: msgspec.structs.replace(welcome, num_blocks=2**31), "liar", "num_blocks"),
        (lambda welcome: msgspec.structs.replace(welcome, num_blocks=2**20), "liar", "failed"),
        (lambda welcome: welcome, "another", "is kvbaton-liar; it should be kvbaton-another"),
        (
            lambda welcome: NixlPoolInfo(DataStatus.DENIED, "no pool"),
            "liar",
            "lends nothing over nixl: no pool",
        ),
    ],
    ids=[
        "nonce",
        "metadata",
        "null",
        "no table",
        "huge",
        "many",
        "unregistered",
        "stranger",
        "denied",
    ],
)
def test_a_wrong_description_of_the_pool_is_refused(
    port: NixlPort, reader: Reader, lie: Callable[[NixlPoolInfo], NixlPoolInfo], boot_id: str, words: str
) -> None:
    liar = lying(port, lie)
    try:
        source = Source("p", boot_id, liar.address, TOKEN, "nixl")
        with pytest.raises(TransferError, match=words):
            reader.receiver.probe(source, Read())
    finally:
        liar.close()
    reader.fetch(port.source, range(1), port.grants[NAME])
