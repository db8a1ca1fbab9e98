"""Tile sizes and launch options of the attention kernels, chosen for compute capability 9.0 by what the compiler reports."""

import math
from functools import cache

import torch

from engine.attention.backend import LayerShape

QUERY_TILE = 128
_STAGES_AHEAD = 5
"""From five stages on Triton keeps further tiles of KV in flight: with fewer, which the loads of the block table and then of
the tiles themselves take up, it waits for each tile before it computes."""
COMBINED_AT_ONCE = 32
_LEAST_ROWS = 16
_MOST_CHUNK_ROWS = 64
_MULTIPROCESSORS_OF_INTERPRETER = 2


def sizes_of(dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """Return the kernels' tile sizes for this number format, which fit the registers of compute capability 9.0.

    tokens: queries of a prefill program. tile: tokens of KV per iteration. dims: the head dim, padded.
    """
    dims = power_of_two(head_dim)
    is_wide = dtype == torch.float32 or dims > 256
    tokens, tile = (32, 16) if is_wide else (128, 64) if dims <= 128 else (64, 32)
    num_stages = _STAGES_AHEAD if dims <= 128 else 3
    launch = {"num_warps": 8 if tokens == QUERY_TILE else 4, "num_stages": num_stages}
    return {
        "head_dim": head_dim, "dims": dims, "tokens": tokens, "parts": QUERY_TILE // tokens, "tile": tile, **launch
    }  # fmt: skip


def split_launch(dims: int) -> dict[str, int]:
    """Return the launch options of the split kernel."""
    return {"num_warps": 4, "num_stages": _STAGES_AHEAD if dims <= 128 else 3}


def store_launch(num_kv_heads: int, head_dim: int) -> dict[str, int]:
    """Return padded sizes and warps of the kernel that stores KV: eight elements per thread, within 1 to 8 warps."""
    heads = 1 << (num_kv_heads - 1).bit_length()
    dims = power_of_two(head_dim)
    return {"heads": heads, "dims": dims, "num_warps": min(8, max(1, heads * dims // 256))}


def chunk_rows(dtype: torch.dtype, head_dim: int) -> int:
    """Return the packed rows of a unit of a short chunk."""
    sizes = sizes_of(dtype, head_dim)
    return min(_MOST_CHUNK_ROWS if sizes["dims"] <= 128 else _MOST_CHUNK_ROWS // 2, sizes["tokens"])


def programs_at_once(rows: int, dims: int) -> int:
    """Return the programs of the split kernel that one multiprocessor holds. rows: packed and padded rows of a unit."""
    return 3 if rows <= _LEAST_ROWS and dims <= 128 else 2


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; for the interpreter, some number."""
    if device.type != "cuda":
        return _MULTIPROCESSORS_OF_INTERPRETER
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def cap_of(shape: LayerShape) -> float:
    """Return the soft cap for scores in base 2; 0 is none."""
    return 0.0 if shape.softcap is None else shape.softcap * math.log2(math.e)


def precision_of(dtype: torch.dtype) -> str:
    """Return the precision of products: float32 without TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def power_of_two(size: int) -> int:
    """Return the smallest power of two from ``size`` on that the tensor cores support."""
    return max(_LEAST_ROWS, 1 << (size - 1).bit_length())
