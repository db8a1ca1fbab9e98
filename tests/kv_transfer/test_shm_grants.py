"""The grants of an ``shm`` sender, and a reader that checks them."""

import mmap
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.errors import TransferError
from kv_transfer.protocol.reads import RangeGrant, StaleLeaseError
from kv_transfer.transports.leases import NUM_SLOTS, TABLE_BYTES, GenerationTable, decode_grant
from kv_transfer.transports.shm.sender import ID_TYPE
from tests.kv_transfer.shm_port import NAME, Reader, ShmPort


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


def damaged(given: RangeGrant, **changes: Any) -> RangeGrant:
    """A range with something else in its grant."""
    grant = msgspec.structs.replace(decode_grant(given.by_transport["shm"]), **changes)
    return msgspec.structs.replace(given, by_transport={"shm": msgspec.msgpack.encode(grant)})


def packed(*block_ids: int) -> bytes:
    return array("q", block_ids).tobytes()


def test_a_malformed_or_wrong_grant_is_refused(port: ShmPort, reader: Reader) -> None:
    (good,) = port.publish(NAME, [6, 7])
    wrong = {
        "without a grant for shm": (),
        "malformed grant": (RangeGrant(0, 2, {"tcp": b"words"}),),
        "other blocks than it published": (damaged(good, packed_ids=bytes(8)),),
        "3 bytes of block ids": (damaged(good, packed_ids=bytes(3)),),
        "granted block 16777216 of a pool of 100": (damaged(good, packed_ids=packed(5, 2**24)),),
        "granted block -1 of a pool of 100": (damaged(good, packed_ids=packed(-1, 5)),),
        "granted block 100 of a pool of 100": (damaged(good, packed_ids=packed(100, 5)),),
        "malformed": (damaged(good, slot=0),),
        "malformed grant: Expected `int` <= 65535": (damaged(good, slot=65536),),
    }
    for words, grants in wrong.items():
        with pytest.raises(TransferError, match=words):
            reader.fetch(port.source, range(2), grants)
    later = msgspec.structs.replace(good, first_block=3)
    with pytest.raises(TransferError, match="other blocks than it published"):
        reader.fetch(port.source, range(2), (good, later))
    reader.fetch(port.source, range(2), (good,))
    assert reader.first_bytes(2) == [7, 8]


def generations_in(table: GenerationTable) -> list[int]:
    """Return the slots' values, as a reader finds them."""
    with mmap.mmap(table.descriptor, TABLE_BYTES, prot=mmap.PROT_READ) as mapped:
        return list(memoryview(mapped[:]).cast("Q"))


def test_nothing_else_passes_for_a_table_of_generations() -> None:
    """Neither zeros nor the table of another incarnation, which a late reader may find at the same address."""
    first, second = GenerationTable(lambda _: None, ID_TYPE), GenerationTable(lambda _: None, ID_TYPE)
    generations, others = generations_in(first), generations_in(second)
    assert len(generations) == NUM_SLOTS
    assert not any(one == other for one, other in zip(generations, others, strict=True))
    assert all(generations)
    assert first.nonce == generations[0]
    first.close()
    second.close()


def test_blocks_in_the_middle_are_found_by_the_ranges_that_they_are_in(port: ShmPort, reader: Reader) -> None:
    port.publish(NAME, [6, 7])
    port.publish(NAME, [3, 90, 11])
    port.publish(NAME, [8])
    reader.fetch(port.source, range(3, 6), port.grants[NAME][1:])
    assert reader.first_bytes(3) == [91, 12, 9]
    for blocks, outside in ((range(1, 4), 1), (range(5, 7), 6)):
        words = f"block {outside} of transfer t is not readable; 4 blocks are"
        with pytest.raises(StaleLeaseError, match=words):
            reader.fetch(port.source, blocks, port.grants[NAME][1:])
    assert reader.first_bytes(3) == [91, 12, 9]
