"""A Triton kernel that quantises the inputs of a product: one launch instead of six.

Imported only if Triton is installed. Each row is computed in float32 and does not depend on the others; the results are
bit by bit those of ``engine.fp8.linear.by_token`` and ``by_scale``.
"""

import triton
import triton.language as tl


@triton.jit
def quantise_kernel(
    states,
    fixed_scale,
    numbers,
    scales,
    largest,
    smallest,
    size: tl.constexpr,
    padded: tl.constexpr,
    is_fixed: tl.constexpr,
):
    """Write one row of ``states [num_rows, size]`` in FP8, and the scale of the row: its own, or the fixed one."""
    column = tl.arange(0, padded)
    is_column = column < size
    row = tl.program_id(0)
    place = row.to(tl.int64) * size + column
    wide = tl.load(states + place, mask=is_column, other=0.0).to(tl.float32)
    own = tl.maximum(tl.div_rn(tl.max(tl.abs(wide), 0), largest), smallest)
    scale = tl.load(fixed_scale) if is_fixed else own
    number = tl.minimum(tl.maximum(tl.div_rn(wide, scale), -largest), largest)
    tl.store(numbers + place, number.to(tl.float8e4nv, fp_downcast_rounding="rtne"), mask=is_column)
    # The limits above may turn what is no number into one, so the scale passes it on to the whole row.
    has_nan = tl.max((wide != wide).to(tl.int32), 0) > 0
    tl.store(scales + row, tl.where(has_nan, float("nan"), scale))
