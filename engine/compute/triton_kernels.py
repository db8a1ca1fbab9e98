"""The Triton kernel that finds the best token of each row. Imported only if Triton is installed."""

import triton
import triton.language as tl

KEYS_AT_ONCE = 128


@triton.jit
def _token_of(key):
    """Return the token of a key, and 1 if its logit is a number, else 0; keys are described in ``best_tokens``."""
    infinity: tl.constexpr = 0x7F800000
    low_bits: tl.constexpr = 0x7FFFFFFF
    offset: tl.constexpr = 0x80000001
    order = (key >> 31) - offset
    is_number = (order < infinity) & (order > -infinity - 1)
    return low_bits - (key & low_bits), is_number.to(tl.int64)


@triton.jit(do_not_specialize=["num_keys"])
def tokens_kernel(keys, best, num_keys, tile: tl.constexpr, overlaps: tl.constexpr):
    """Write into best ``[num_keys, 2]`` the token of each key, and 1 if its logit is a number."""
    if overlaps:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    mask = row < num_keys
    token, is_number = _token_of(tl.load(keys + row, mask=mask, other=0))
    tl.store(best + 2 * row, token, mask=mask)
    tl.store(best + 2 * row + 1, is_number, mask=mask)


@triton.jit(do_not_specialize=["first_token"])
def best_kernel(
    logits, keys, counters, found_of_row, row_stride, size, first_token,
    tile: tl.constexpr, finds_keys: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    """Find the best of some tiles of a row's logits; the last of the row's programs writes the best of all.

    found_of_row ``[num_rows, 2]``: the lowest token among equals, and 1 if its logit is a number; ``[num_rows]`` keys of
    these if ``finds_keys``. NaN is best. The first column is that of ``first_token``. keys and counters, one of each row,
    are zero before and after.
    """
    if overlaps:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    infinity: tl.constexpr = 0x7F800000
    low_bits: tl.constexpr = 0x7FFFFFFF
    offset: tl.constexpr = 0x80000001
    row = tl.program_id(1)
    own = logits + row.to(tl.int64) * row_stride
    highest = tl.full([tile], -low_bits - 1, dtype=tl.int32)
    found = tl.zeros([tile], dtype=tl.int32)
    for start in range(tl.program_id(0) * tile, size, tl.num_programs(0) * tile):
        column = start + tl.arange(0, tile)
        logit = tl.load(own + column, mask=column < size, other=float("-inf")).to(tl.float32)
        bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)  # both zeros are equal
        order = tl.where(bits < 0, bits ^ low_bits, bits)
        order = tl.where(logit != logit, infinity + 1, order)
        is_better = (order > highest) & (column < size)
        highest = tl.where(is_better, order, highest)
        found = tl.where(is_better, column, found)
    top = tl.max(highest, 0)
    token = tl.min(tl.where(highest == top, found, low_bits), 0)
    key = ((top.to(tl.int64) + offset) << 31) | (low_bits - first_token - token).to(tl.int64)
    tl.atomic_max(keys + row, key, sem="release")
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        key = tl.atomic_xchg(keys + row, key * 0, sem="acquire")
        tl.store(counters + row, 0)
        if finds_keys:
            tl.store(found_of_row + row, key)
        else:
            best_token, is_number = _token_of(key)
            tl.store(found_of_row + 2 * row, best_token)
            tl.store(found_of_row + 2 * row + 1, is_number)
