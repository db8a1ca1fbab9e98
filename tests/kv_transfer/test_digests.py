"""The digest ``fold64``: what it detects, its equality in C and NumPy, and how two workers agree on it."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contract.errors import IncompatiblePeerError, InternalError, TransferError
from contract.identity import Role
from contract.layout import KVLayout
from kv_transfer.native.folding import fold_by_numpy, fold_words, load_fold
from kv_transfer.protocol.digests import FOLD64, XXH3_64, digests_of, running_digests
from kv_transfer.protocol.handshake import Accepting, Dialing, LocalIdentity, PeerTarget
from kv_transfer.protocol.messages import Message, Offer, Prove, Welcome
from kv_transfer.protocol.reads import BlockPart
from kv_transfer.ranks.rank_data_group import _together
from kv_transfer.ranks.rank_messages import Opened
from kv_transfer.transports.block_views import BlockViews
from tests.kv_transfer.builders import identity_for

SIZES = [8, 16, 24, 56, 64, 120, 256, 264, 504, 512, 1024, 1032, 4096, 65536 + 8]
"""Around the 32 bytes and the 128 bytes (256 with AVX-512) that are added up at once."""


def content_of(num_bytes: int, seed: int = 1) -> bytearray:
    return bytearray(random.Random(seed).randbytes(num_bytes))


def digest(content: bytes | bytearray, seed: int = 5) -> int:
    (found,) = digests_of(FOLD64, [memoryview(content)], [seed])
    return found


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_c_and_numpy_compute_the_same(num_bytes: int, offset: int) -> None:
    """From any word on, at any address, with keys and sums that wrap."""
    assert fold_words() is not fold_by_numpy
    content = np.frombuffer(content_of(3 * num_bytes + offset), np.uint8)
    begins = content.ctypes.data + offset + num_bytes * np.arange(3, dtype=np.uint64)
    seeds = np.array([0, 2**64 - 1, 0x0123456789ABCDEF], np.uint64)
    for first_word in (0, 7, 2**61 - 1):
        found = np.full((2, 3), 2**64 - 2, np.uint64)
        expected = found.copy()
        fold_words()(found, begins, seeds, first_word, num_bytes // 8)
        fold_by_numpy(expected, begins, seeds, first_word, num_bytes // 8)
        assert found.tolist() == expected.tolist()


def test_its_definition() -> None:
    """Word by word, in Python's whole numbers."""
    content, seed, step = content_of(88), 2**64 - 9, 0x9E3779B97F4A7C15
    products = words = 0
    for number in range(11):
        word = int.from_bytes(content[8 * number : 8 * number + 8], "little")
        mixed = word ^ (seed + number * step) % 2**64
        products += (mixed % 2**32) * (mixed >> 32)
        words += word
    scrambled = words % 2**64
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        scrambled = (scrambled ^ scrambled >> 33) * factor % 2**64
    assert digest(content, seed) == products % 2**64 ^ scrambled ^ scrambled >> 33


@pytest.mark.parametrize("content", [content_of(1032), bytearray(1032), bytearray(b"\xff" * 1032)])
def test_every_bit_counts(content: bytearray) -> None:
    whole = digest(content)
    found = set[int]()
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        found.add(digest(content))
        content[bit // 8] ^= 1 << bit % 8
    assert len(found) == 8 * len(content)
    assert whole not in found


def swapped(content: bytearray, first: int, second: int, size: int) -> bytes:
    copy = bytearray(content)
    copy[first : first + size], copy[second : second + size] = (
        content[second : second + size],
        content[first : first + size],
    )
    return bytes(copy)


FAULTS: dict[str, Callable[[bytearray], list[bytes]]] = {
    "words are swapped": lambda content: [
        swapped(content, 8 * first, 8 * second, 8) for first in range(32) for second in range(first)
    ],
    "halves are swapped": lambda content: [swapped(content, at, at + 4, 4) for at in range(0, 256, 8)],
    "ranges are swapped": lambda content: [swapped(content, 0, at, 64) for at in range(64, 1024, 64)],
    "a range is zero": lambda content: [
        bytes(content[:at] + bytes(size) + content[at + size :])
        for size in (1, 2, 8, 64, 512)
        for at in range(0, 512, 8)
    ],
    "it is shifted": lambda content: [bytes(content[at:] + content[:at]) for at in range(1, 1024)],
    "a part is shifted": lambda content: [
        bytes(content[:at] + content[:8] + content[at:-8]) for at in range(8, 512, 8)
    ],
    "a range is repeated": lambda content: [
        bytes(content[:at] + content[:at] + content[2 * at :]) for at in range(8, 512, 8)
    ],
    "two bits of one place": lambda content: [
        bytes(each ^ (1 if at in (first, first + 8) else 0) for at, each in enumerate(content))
        for first in range(256)
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_detected(fault: str) -> None:
    content = content_of(1024)
    wrong = {each for each in FAULTS[fault](content) if each != content}
    digests = {digest(each) for each in wrong}
    assert len(digests) == len(wrong) > 14
    assert digest(content) not in digests


def test_the_seed_counts() -> None:
    for content in (content_of(256), bytearray(256)):
        assert len({digest(content, seed) for seed in [*range(500), 2**63, 2**64 - 1]}) == 502


@pytest.mark.parametrize("algorithm", [FOLD64, XXH3_64])
def test_parts_give_the_digest_of_the_whole(algorithm: str) -> None:
    """The blocks are in a flat pool or each by itself, and are added in different ranges."""
    size = 3 * 264
    pool = memoryview(content_of(5 * size))
    ids = [4, 0, 3]
    views = BlockViews(pool, size, ids)
    seeds = [9, 2**64 - 1, 0]
    whole = digests_of(algorithm, views, seeds)
    assert whole == digests_of(algorithm, [bytearray_of(view) for view in views], seeds)
    running = running_digests(algorithm, seeds)
    running.go_on(BlockViews(pool, size, ids, BlockPart(0, 264)))
    running.go_on([])
    running.go_on([view[264:528] for view in views[:2]])
    running.go_on(BlockViews(pool, size, ids[2:], BlockPart(264, 528)), 2)
    running.go_on(BlockViews(pool, size, ids[:2], BlockPart(528, 264)))
    assert running.values(0, 3) == whole
    assert running.values(1, 2) == whole[1:2]


def bytearray_of(view: memoryview) -> memoryview:
    return memoryview(bytearray(view))


def test_parts_of_words_are_refused() -> None:
    """A peer announces how much of each block is readable."""
    running = running_digests(FOLD64, [0])
    with pytest.raises(TransferError, match="fold64 cannot digest 12 bytes of a block from byte 0 on"):
        running.go_on([memoryview(bytes(12))])


def test_a_machine_without_a_compiler_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_fold(Path("no such library"), tmp_path, compiler="no-such-compiler") is None
    assert "falling back to slower digests of KV from a device: there is no C compiler" in caplog.text


def identity(worker_id: str, announced: str) -> LocalIdentity:
    offers = [Offer("tcp", "127.0.0.1:9")]
    return replace(identity_for(worker_id, Role.AGGREGATED, offers=offers), digest=lambda: announced)


def answer(side: Dialing | Accepting, messages: list[Message]) -> list[Message]:
    return [reply for message in messages for reply in side.receive(message)]


@pytest.mark.parametrize("announced", [FOLD64, XXH3_64])
def test_the_sender_names_its_algorithm(announced: str) -> None:
    """The reader may announce its own blocks by another one."""
    dialer = Dialing(identity("d", XXH3_64), PeerTarget("p", "boot-p", "127.0.0.1:1"))
    acceptor = Accepting(identity("p", announced))
    answer(dialer, answer(acceptor, answer(dialer, answer(acceptor, dialer.begin()))))
    assert dialer.session is not None
    assert dialer.session.digest == announced


def test_an_algorithm_that_the_reader_lacks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sender, which has the reader's list, and by a reader whose sender does not care."""
    dialer = Dialing(identity("d", XXH3_64), PeerTarget("p", "boot-p", "127.0.0.1:1"))
    acceptor = Accepting(identity("p", "fold128"))
    proved = answer(dialer, answer(acceptor, dialer.begin()))
    refused = r"digest: blocks are announced by fold128, and verified by xxh3_64 or fold64"
    assert isinstance(proved[0], Prove)
    with pytest.raises(IncompatiblePeerError, match=refused):
        answer(acceptor, proved)
    assert acceptor.session is None
    monkeypatch.setattr("kv_transfer.protocol.handshake._why_no_digest", lambda _announced, _verified: None)
    second = Accepting(identity("p", "fold128"))
    dialer = Dialing(identity("d", XXH3_64), PeerTarget("p", "boot-p", "127.0.0.1:1"))
    welcome = answer(second, answer(dialer, answer(second, dialer.begin())))
    assert isinstance(welcome[0], Welcome)
    monkeypatch.undo()
    with pytest.raises(IncompatiblePeerError, match=refused):
        answer(dialer, welcome)


def test_ranks_that_differ_are_refused() -> None:
    same = Opened([], [], FOLD64)
    assert _together([same, same]).digest == FOLD64
    with pytest.raises(InternalError, match="fold64 on rank 0, xxh3_64 on rank 1"):
        _together([same, Opened([], [], XXH3_64)])


def test_no_layout_of_a_model_has_parts_of_words() -> None:
    """Heads have an even number of dimensions, and values two bytes or more."""
    layout = KVLayout(num_layers=3, num_kv_heads=1, head_dim=2, block_size=1, dtype="bfloat16")
    assert layout.block_bytes // layout.num_layers % 8 == 0
