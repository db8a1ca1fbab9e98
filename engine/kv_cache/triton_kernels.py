"""The Triton kernel of the digest ``fold64`` of KV blocks. Imported only if Triton is installed."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["count", "block_words", "first_word", "num_words"],
    do_not_specialize_on_alignment=["words", "packed"],
)
def fold_kernel(
    words,
    packed,
    count,
    block_words,
    first_word,
    num_words,
    step: tl.constexpr,
    tile_step: tl.constexpr,
    tile: tl.constexpr,
    num_tiles: tl.constexpr,
):
    """Add both sums of ``num_tiles`` tiles of the words of one block; ``kv_transfer/native/fold.c`` is the same on the host.

    packed: ``[4, count]``: block ids, seeds, sums of products, sums of words. tile_step: the step of the keys from one tile
    to the next.
    """
    index = tl.program_id(0)
    at = tl.program_id(1) * (tile * num_tiles) + tl.arange(0, tile)
    block = tl.load(packed + index)
    seed = tl.load(packed + count + index)
    own = words + block * block_words + first_word
    key = seed + (first_word + at).to(tl.int64) * step
    products = tl.zeros([tile], tl.int64)
    sums = tl.zeros([tile], tl.int64)
    for _ in tl.static_range(num_tiles):
        is_there = at < num_words
        word = tl.load(own + at, mask=is_there, other=0)
        mixed = word ^ key
        product = (mixed & 0xFFFFFFFF) * ((mixed >> 32) & 0xFFFFFFFF)
        products += tl.where(is_there, product, 0)
        sums += word
        at += tile
        key += tile_step
    tl.atomic_add(packed + 2 * count + index, tl.sum(products, 0), sem="relaxed")
    tl.atomic_add(packed + 3 * count + index, tl.sum(sums, 0), sem="relaxed")
