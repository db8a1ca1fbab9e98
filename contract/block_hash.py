"""The canonical hash of a KV block, the same in the router, prefill and decode workers (law 7).

A block's hash covers its parent's hash, its token ids, and (through the root) everything else that affects its KV: model
fingerprint, LoRA, cache salt. Python's ``hash`` is not used: it differs between processes.
"""

import hashlib
import struct
from collections.abc import Sequence

BlockHash = bytes
HASH_BYTES = 16


def root_hash(model_fingerprint: str, cache_salt: str = "", lora: str = "") -> BlockHash:
    """Return the parent hash of a prompt's first block. With equal roots, equal tokens have equal KV."""
    state = hashlib.blake2b(digest_size=HASH_BYTES, person=b"kvbaton.root")
    for part in (model_fingerprint, cache_salt, lora):
        encoded = part.encode()
        # With its length, so that two lists of parts never give the same bytes.
        state.update(struct.pack("<I", len(encoded)))
        state.update(encoded)
    return state.digest()


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return the hash of one block, full or partly filled, from its parent's hash and its token ids."""
    state = hashlib.blake2b(parent, digest_size=HASH_BYTES, person=b"kvbaton.block")
    state.update(struct.pack(f"<{len(token_ids)}I", *token_ids))
    return state.digest()


def full_block_hashes(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Return the hashes of the ``len(token_ids) // block_size`` full blocks, first to last."""
    hashes = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


def all_block_hashes(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Return ``full_block_hashes``, and the hash of the partly filled last block if there is one."""
    hashes = full_block_hashes(root, token_ids, block_size)
    rest = token_ids[len(hashes) * block_size :]
    if rest:
        hashes.append(block_hash(hashes[-1] if hashes else root, rest))
    return hashes
