"""Triton kernels between a decoder's matrix products: norms with their residual, the gate.

Imported only if Triton is installed. Each row is computed in float32 and does not depend on the others. Sizes that are
powers of two (``padded``, ``tile``) are tile sizes; the others are the real sizes.
"""

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    states,
    added,
    weight,
    normed,
    eps,
    size: tl.constexpr,
    padded: tl.constexpr,
    has_added: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Add ``added`` to one token's ``states`` in place, if present, and write the root-mean-square norm to ``normed``."""
    column = tl.arange(0, padded)
    is_column = column < size
    place = tl.program_id(0).to(tl.int64) * size + column
    scale = tl.load(weight + column, mask=is_column, other=0.0)
    if overlaps:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    own = tl.load(states + place, mask=is_column, other=0.0)
    if has_added:
        more = tl.load(added + place, mask=is_column, other=0.0)
        own = (own.to(tl.float32) + more.to(tl.float32)).to(own.dtype)
        tl.store(states + place, own, mask=is_column)
    wide = own.to(tl.float32)
    wide = wide / tl.sqrt(tl.sum(wide * wide, 0) / size + eps)
    tl.store(normed + place, wide.to(own.dtype) * scale, mask=is_column)


@triton.jit
def gate_kernel(packed, output, size: tl.constexpr, tile: tl.constexpr, overlaps: tl.constexpr):
    """Compute silu(gate) × up (Shazeer 2020) of a tile of one token; ``packed`` has gate and up side by side."""
    if overlaps:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    is_column = column < size
    place = packed + token * 2 * size + column
    gate = tl.load(place, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(place + size, mask=is_column, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(output + token * size + column, product.to(output.dtype.element_ty), mask=is_column)
