"""The digests of blocks: their seeds, and the algorithms by which they are computed.

A sender announces blocks by one algorithm, which the handshake names. ``xxh3_64`` is computed on the host. ``fold64`` can be
computed on a device, too, by many threads at once, and in host memory with the same result (``native/fold.c``).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from contract.block_hash import all_block_hashes
from contract.errors import TransferError
from contract.layout import Side
from contract.requests import EngineRequest
from kv_transfer.native.folding import WORD_BYTES, fold_words

XXH3_64 = "xxh3_64"
FOLD64 = "fold64"
DIGESTS = (XXH3_64, FOLD64)
"""The algorithms that this version can verify."""
_DIGESTED_AT_ONCE = 2**20
_SCRAMBLED_BITS = np.uint64(33)
Numbers = npt.NDArray[np.uint64]


class Share(msgspec.Struct, frozen=True):
    """The digests that one rank of the sender announced of a range of its blocks."""

    rank: int
    digests: tuple[int, ...]


def digest_seeds(request: EngineRequest, model_fingerprint: str, side: Side) -> list[int]:
    """Return one seed per block of the transfer, from the block's hash: right bytes of a wrong prompt fail too.

    Groups after the first add their names, so a block of another group at the same place fails. States are those of the
    whole prompt, so each piece of them starts from the hash of all its tokens, in blocks of any size.
    """
    tokens = request.prompt_token_ids
    root = request.hash_root(model_fingerprint)
    hashes = all_block_hashes(root, tokens, side.layout.block_size)
    chosen: list[bytes] = []
    for group, places in enumerate(side.places_to_send(len(tokens))):
        if group == side.state_group:
            (whole,) = all_block_hashes(root, tokens, len(tokens))
            name = side.group_names[group]
            chosen += [_digest(whole + f"{name} {place}".encode()) for place in places]
        elif group == 0:
            chosen += hashes[places.start : places.stop]
        else:
            name = side.group_names[group]
            chosen += [_digest(hashes[place] + name.encode()) for place in places]
    return [int.from_bytes(each[:8], "little") for each in chosen]


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()


class RunningDigests(ABC):
    """Owns the digests of blocks whose bytes arrive in parts, each block's in order. Used from one thread."""

    @abstractmethod
    def go_on(self, parts: Sequence[memoryview], start: int = 0) -> None:
        """Add the next bytes of the blocks from ``start`` on, one part of the same size for each. Raises TransferError."""

    @abstractmethod
    def values(self, start: int, end: int) -> tuple[int, ...]:
        """Return the digests of the blocks ``start``..``end`` - 1 over the bytes that were added so far."""


def running_digests(algorithm: str, seeds: Sequence[int]) -> RunningDigests:
    """Return digests by an algorithm of ``DIGESTS``."""
    return FoldDigests(seeds) if algorithm == FOLD64 else XxhDigests(seeds)


class XxhDigests(RunningDigests):
    """Digests by ``xxh3_64``."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._digests = [xxhash.xxh3_64(seed=seed) for seed in seeds]

    def go_on(self, parts: Iterable[memoryview], start: int = 0) -> None:
        """See RunningDigests."""
        for digest, part in zip(self._digests[start:], parts, strict=False):
            update(digest, part)

    def values(self, start: int, end: int) -> tuple[int, ...]:
        """See RunningDigests."""
        return tuple(int(digest.intdigest()) for digest in self._digests[start:end])


class FoldableViews(Sequence[memoryview], ABC):
    """Views of one size that compute the sums of ``fold64`` over their bytes faster than one view after the other."""

    @property
    @abstractmethod
    def view_bytes(self) -> int:
        """The size of each view."""

    @abstractmethod
    def fold(self, sums: Numbers, seeds: Numbers, first_word: int) -> None:
        """Add the sums of all views (``FoldWords``), which begin at word ``first_word`` of their blocks."""


class FoldDigests(RunningDigests):
    """Digests by ``fold64``: two sums per block, in which each word's place counts (``native/fold.c``)."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = np.array(seeds, np.uint64)
        self._sums = np.zeros((2, len(seeds)), np.uint64)
        self._num_bytes = np.zeros(len(seeds), np.int64)

    def go_on(self, parts: Sequence[memoryview], start: int = 0) -> None:
        """See RunningDigests."""
        if not parts:
            return
        here = slice(start, start + len(parts))
        sums = np.zeros((2, len(parts)), np.uint64)
        first = int(self._num_bytes[start])
        size = fold(parts, sums, self._seeds[here], first)
        self._sums[:, here] += sums
        self._num_bytes[here] += size

    def values(self, start: int, end: int) -> tuple[int, ...]:
        """See RunningDigests."""
        products, words = self._sums[:, start:end]
        return tuple((products ^ _scrambled(words)).tolist())


def fold(views: Sequence[memoryview], sums: Numbers, seeds: Numbers, first_byte: int) -> int:
    """Add the sums of views that begin at ``first_byte`` of their blocks, and return their size. Raises TransferError."""
    whole = views if isinstance(views, FoldableViews) else None
    size = views[0].nbytes if whole is None else whole.view_bytes
    if size % WORD_BYTES or first_byte % WORD_BYTES:
        raise TransferError(f"{FOLD64} cannot digest {size} bytes of a block from byte {first_byte} on")
    if whole is None:
        fold_in_host_memory(views, sums, seeds, first_byte // WORD_BYTES)
    else:
        whole.fold(sums, seeds, first_byte // WORD_BYTES)
    return size


def fold_in_host_memory(views: Iterable[memoryview], sums: Numbers, seeds: Numbers, first_word: int) -> None:
    """See ``FoldableViews.fold``; the views have one size."""
    kept = [np.frombuffer(view, np.uint8) for view in views]
    addresses = np.array([each.__array_interface__["data"][0] for each in kept], np.uint64)
    fold_words()(sums, addresses, seeds, first_word, kept[0].nbytes // WORD_BYTES)


def _scrambled(numbers: Numbers) -> Numbers:
    """Return other numbers, one to one, so that no change of both sums of a block cancels out (MurmurHash3's end)."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        numbers = (numbers ^ (numbers >> _SCRAMBLED_BITS)) * np.uint64(factor)
    return numbers ^ (numbers >> _SCRAMBLED_BITS)


def update(digest: xxhash.xxh3_64, content: memoryview) -> None:
    """Add content to a digest; other threads can take Python's lock after every mebibyte."""
    for start in range(0, content.nbytes, _DIGESTED_AT_ONCE):
        digest.update(content[start : start + _DIGESTED_AT_ONCE])


def digest_of(block: memoryview, seed: int) -> int:
    """Return the digest of a block by ``xxh3_64``."""
    digest = xxhash.xxh3_64(seed=seed)
    update(digest, block)
    return int(digest.intdigest())


def digests_of(algorithm: str, blocks: Sequence[memoryview], seeds: Sequence[int]) -> tuple[int, ...]:
    """Return the digest of each block. There must be at least one, and all must have the same size. Raises TransferError."""
    if algorithm == FOLD64:
        digests = FoldDigests(seeds)
        digests.go_on(blocks)
        return digests.values(0, len(blocks))
    if blocks[0].nbytes > _DIGESTED_AT_ONCE:
        return tuple(map(digest_of, blocks, seeds))
    return tuple(map(xxhash.xxh3_64_intdigest, blocks, seeds))  # no Python for each of thousands
