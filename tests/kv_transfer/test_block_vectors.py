"""Blocks through a socket by lists of addresses: the same bytes as by views, and none lost where a call ends early."""

import random
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kv_transfer.links.framing import ShortReadError
from kv_transfer.protocol.reads import BlockPart
from kv_transfer.transports.block_views import BlockViews
from kv_transfer.transports.tcp.socket_blocks import SocketBlocks, socket_blocks, vectors_after

BLOCK_BYTES, NUM_BLOCKS = 4096, 64
CONTENT = random.Random(3).randbytes(BLOCK_BYTES * NUM_BLOCKS)
LENT, INTO = (random.Random(seed).sample(range(NUM_BLOCKS), 40) for seed in (1, 2))
Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def blocks_of(pool: memoryview, ids: list[int], part: BlockPart | None, is_flat: bool) -> SocketBlocks:
    views = BlockViews(pool, BLOCK_BYTES, ids, part)
    return socket_blocks(views if is_flat else list(views))


@pytest.mark.parametrize("part", [None, BlockPart(64, 128)])
@pytest.mark.parametrize("receives_flat", [True, False])
@pytest.mark.parametrize("sends_flat", [True, False])
def test_every_block_arrives_in_its_place(
    ends: Ends, part: BlockPart | None, sends_flat: bool, receives_flat: bool
) -> None:
    """In several calls, some with frames before the blocks, out of a read-only pool."""
    target = bytearray(BLOCK_BYTES * NUM_BLOCKS)
    lent = blocks_of(memoryview(CONTENT), LENT, part, sends_flat)
    into = blocks_of(memoryview(target), INTO, part, receives_flat)

    def send() -> None:
        lent.send(ends[0], b"one", 0, 7)
        lent.send(ends[0], b"more", 7, 20)
        lent.send(ends[0], b"", 20, len(LENT))

    sending = threading.Thread(target=send)
    sending.start()
    for words, start, end in ((b"one", 0, 5), (b"", 5, 7), (b"more", 7, len(LENT))):
        heard = bytearray(len(words))
        into.receive(ends[1], heard, start, end)
        assert heard == words
    sending.join()
    wanted = bytearray(BLOCK_BYTES * NUM_BLOCKS)
    start, size = (part.start_byte, part.num_bytes) if part else (0, BLOCK_BYTES)
    for lent_id, own_id in zip(LENT, INTO, strict=True):
        at, there = own_id * BLOCK_BYTES + start, lent_id * BLOCK_BYTES + start
        wanted[at : at + size] = CONTENT[there : there + size]
    assert target == wanted


@pytest.mark.parametrize("is_flat", [True, False])
def test_a_stream_that_ends_early_says_how_far_it_came(ends: Ends, is_flat: bool) -> None:
    into = blocks_of(memoryview(bytearray(BLOCK_BYTES * NUM_BLOCKS)), INTO, None, is_flat)
    ends[0].sendall(bytes(3 * BLOCK_BYTES + 5))
    ends[0].close()
    with pytest.raises(ShortReadError) as caught:
        into.receive(ends[1], bytearray(5), 2, 9)
    assert caught.value.num_bytes == 3 * BLOCK_BYTES + 5


@pytest.mark.parametrize("is_flat", [True, False])
def test_a_patience_that_is_over_is_an_error(ends: Ends, is_flat: bool) -> None:
    into = blocks_of(memoryview(bytearray(BLOCK_BYTES * NUM_BLOCKS)), INTO, None, is_flat)
    ends[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        into.receive(ends[1], bytearray(), 0, 1)


@pytest.mark.parametrize("count", range(60))
def test_what_is_left_of_a_call_that_ended_early(count: int) -> None:
    """Byte by byte: every address that was not reached, in order."""
    vectors = [(100, 20), (500, 1), (300, 39)]
    everything = [address + at for address, size in vectors for at in range(size)]
    rest = vectors_after(np.array(vectors, np.uint64), count) if count else np.array(vectors, np.uint64)
    assert [int(address) + at for address, size in rest for at in range(int(size))] == everything[count:]
