"""The canonical block hash: what it covers, and that it is the same in every process and every release (law 7)."""

from contract.block_hash import all_block_hashes, block_hash, full_block_hashes, root_hash

TOKENS = list(range(1, 11))


def test_whatever_makes_kv_differ_gives_another_hash() -> None:
    """Model, salt, LoRA, every token and everything before the block; also where the parts only join alike."""
    roots = [
        root_hash("model"),
        root_hash("another"),
        root_hash("model", "salt"),
        root_hash("model", "", "salt"),
        root_hash("models", "alt"),
        root_hash("model", "s", "alt"),
    ]
    hashes = roots + [block_hash(root, TOKENS) for root in roots]
    hashes += [block_hash(roots[0], tokens) for tokens in (TOKENS[:-1], TOKENS[::-1], [*TOKENS, 0])]
    hashes += full_block_hashes(roots[0], [7] * 12, 4)
    assert len(set(hashes)) == len(hashes)


def test_only_the_rest_of_a_prompt_is_a_partly_filled_block() -> None:
    full, every = (make(root_hash("m"), TOKENS, 4) for make in (full_block_hashes, all_block_hashes))
    assert (len(full), every[:2]) == (2, full)
    assert every[2:] == [block_hash(full[1], TOKENS[8:])]
    assert all_block_hashes(root_hash("m"), TOKENS[:8], 4) == full


def test_the_hash_is_pinned() -> None:
    """Workers of different releases hand over to each other: a change needs another protocol version."""
    root = root_hash("model", "salt", "lora")
    assert root.hex() == "5afafa1001b447dc5ecdc7dca47da23a"
    assert block_hash(root, TOKENS).hex() == "aeca838a413cd70cc070c12dfa02bdb3"
