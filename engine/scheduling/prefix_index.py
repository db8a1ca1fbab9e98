"""Which block holds which content: a two-way map between canonical block hashes and block ids."""

from collections.abc import Iterable, Sequence

from contract.block_hash import BlockHash


class PrefixIndex:
    """Finds blocks by content. Owns no block: the BlockPool enters computed or verified ones and evicts taken ones.

    Of two blocks with the same content the first stays indexed, so a hash names at most one block.
    """

    def __init__(self) -> None:
        self._block_by_hash: dict[BlockHash, int] = {}
        self._hash_by_block: dict[int, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._block_by_hash)

    def find(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest indexed prefix of ``hashes``, first to last."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._block_by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def enter(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Remember that each block holds this content, unless another block does already."""
        block_by_hash = self._block_by_hash
        hash_by_block = self._hash_by_block
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if block_hash not in block_by_hash and block_id not in hash_by_block:
                block_by_hash[block_hash] = block_id
                hash_by_block[block_id] = block_hash

    def evict(self, block_id: int) -> None:
        """Forget the content of a block that is about to be written (nothing to do for an unknown one)."""
        block_hash = self._hash_by_block.pop(block_id, None)
        if block_hash is not None:
            del self._block_by_hash[block_hash]

    def holds(self, block_id: int) -> bool:
        """True when the block's content can be found."""
        return block_id in self._hash_by_block

    def clear(self) -> None:
        """Forget everything."""
        self._block_by_hash.clear()
        self._hash_by_block.clear()

    def check_integrity(self) -> None:
        """Assert that both directions say the same."""
        assert {block: h for h, block in self._block_by_hash.items()} == self._hash_by_block
