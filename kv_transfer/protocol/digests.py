"""The digests of blocks: their seeds, and how they are computed."""

from collections.abc import Iterable, Sequence

import msgspec
import xxhash

from contract.block_hash import all_block_hashes
from contract.requests import EngineRequest

_DIGESTED_AT_ONCE = 2**20


class Share(msgspec.Struct, frozen=True):
    """The digests that one rank of the sender announced of a range of its blocks."""

    rank: int
    digests: tuple[int, ...]


def digest_seeds(request: EngineRequest, model_fingerprint: str, block_size: int) -> list[int]:
    """Return one seed per block of the prompt, from the block's hash: right bytes of a wrong prompt fail too."""
    hashes = all_block_hashes(request.hash_root(model_fingerprint), request.prompt_token_ids, block_size)
    return [int.from_bytes(block_hash[:8], "little") for block_hash in hashes]


class RunningDigests:
    """Owns the digests of blocks whose bytes arrive in parts, each block's in order. Used from one thread."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._digests = [xxhash.xxh3_64(seed=seed) for seed in seeds]

    def go_on(self, parts: Iterable[memoryview], start: int = 0) -> None:
        """Add the next bytes of the blocks from ``start`` on, one part for each."""
        for digest, part in zip(self._digests[start:], parts, strict=False):
            update(digest, part)

    def values(self, start: int, end: int) -> tuple[int, ...]:
        """Return the digests of the blocks ``start``..``end`` - 1 over the bytes that were added so far."""
        return tuple(int(digest.intdigest()) for digest in self._digests[start:end])


def update(digest: xxhash.xxh3_64, content: memoryview) -> None:
    """Add content to a digest; other threads can take Python's lock after every mebibyte."""
    for start in range(0, content.nbytes, _DIGESTED_AT_ONCE):
        digest.update(content[start : start + _DIGESTED_AT_ONCE])


def digest_of(block: memoryview, seed: int) -> int:
    """Return the digest by which a block is announced and verified."""
    digest = xxhash.xxh3_64(seed=seed)
    update(digest, block)
    return int(digest.intdigest())


def digests_of(blocks: Sequence[memoryview], seeds: Sequence[int]) -> tuple[int, ...]:
    """Return ``digest_of`` each block. There must be at least one, and all must have the same size."""
    if blocks[0].nbytes > _DIGESTED_AT_ONCE:
        return tuple(map(digest_of, blocks, seeds))
    return tuple(map(xxhash.xxh3_64_intdigest, blocks, seeds))  # no Python for each of thousands
