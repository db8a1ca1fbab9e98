"""A two-way map between canonical block hashes and the blocks that hold their content."""

from collections.abc import Iterable, Sequence

from contract.block_hash import BlockHash


class PrefixIndex:
    """Finds blocks by content. Owns no block: the BlockPool enters computed or verified ones, and evicts taken ones.

    Of two blocks with the same content the first stays indexed, so a hash names at most one block.
    """

    def __init__(self) -> None:
        self._block_by_hash: dict[BlockHash, int] = {}
        self._hash_by_block: dict[int, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._block_by_hash)

    def find(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the blocks of the longest indexed prefix of ``hashes``, first to last."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._block_by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def enter(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Record that each block holds this content, unless another block does already."""
        block_by_hash = self._block_by_hash
        hash_by_block = self._hash_by_block
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if block_hash not in block_by_hash and block_id not in hash_by_block:
                block_by_hash[block_hash] = block_id
                hash_by_block[block_id] = block_hash

    def evict(self, block_id: int) -> None:
        """Drop the content of a block, if it has any: it is about to be written."""
        block_hash = self._hash_by_block.pop(block_id, None)
        if block_hash is not None:
            del self._block_by_hash[block_hash]

    def holds(self, block_id: int) -> bool:
        """Return whether the block's content can be found."""
        return block_id in self._hash_by_block

    def clear(self) -> None:
        """Drop all entries."""
        self._block_by_hash.clear()
        self._hash_by_block.clear()

    def check_integrity(self) -> None:
        """Assert that both directions agree."""
        assert {block: h for h, block in self._block_by_hash.items()} == self._hash_by_block
