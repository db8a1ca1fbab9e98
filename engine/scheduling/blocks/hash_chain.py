"""The content hashes of a request's blocks, by which they are found in the prefix cache (law 7)."""

from collections.abc import Sequence

from contract.block_hash import BlockHash, block_hash, full_block_hashes


class HashChain:
    """Hashes of the full blocks of a growing list of tokens; each depends on all tokens before its end.

    blocks: one hash for each full block. computed_root: what the chain starts from for KV that this engine computes;
    it starts from another root while the request has KV of another kind (``restart``).
    """

    def __init__(self, computed_root: BlockHash, token_ids: Sequence[int], block_size: int) -> None:
        self.blocks = full_block_hashes(computed_root, token_ids, block_size)
        self._computed_root = computed_root
        self._root = computed_root
        self._block_size = block_size

    @property
    def is_computed_here(self) -> bool:
        """True if the hashes are those of KV that this engine computes, or could have computed."""
        return self._root == self._computed_root

    def copy(self) -> "HashChain":
        """Return a chain that grows by itself from here."""
        twin = HashChain(self._computed_root, (), self._block_size)
        twin.blocks = list(self.blocks)
        twin._root = self._root
        return twin

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the hash of the last block, which the newest token has filled. token_ids: all known tokens."""
        parent = self.blocks[-1] if self.blocks else self._root
        self.blocks.append(block_hash(parent, token_ids[-self._block_size :]))

    def restart(self, token_ids: Sequence[int], root: BlockHash | None = None) -> None:
        """Hash all blocks again from another root. root: None for KV that this engine computes."""
        root = root or self._computed_root
        if root != self._root:
            self._root = root
            self.blocks = full_block_hashes(root, token_ids, self._block_size)
