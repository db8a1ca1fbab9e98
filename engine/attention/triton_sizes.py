"""Tile sizes and launch options of the attention kernels, chosen for compute capability 9.0 by what the compiler reports."""

from functools import cache

import torch

from engine.attention.splits import JOINED_SPLITS

QUERY_TILE = 128
# From five stages on Triton keeps further tiles of KV in flight: with fewer, which the loads of the block table and then of
# the tiles themselves take up, it waits for each tile before it computes.
_STAGES_AHEAD = 5
FEW_SPLITS = 8
"""Splits that are combined at once; contexts of up to 2,048 tokens have no more."""
MANY_SPLITS = 16
_LEAST_ROWS = 16
_SMALL_TILE = 32
# The most registers of a thread, by the programs of four warps that one multiprocessor holds.
_REGISTERS = {3: 168, 4: 128}
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


def decode_tile(dtype: torch.dtype, head_dim: int) -> int:
    """Return the tokens of KV per iteration of a decode: small tiles leave room for more programs, which hide latencies."""
    sizes = sizes_of(dtype, head_dim)
    return min(sizes["tile"], _SMALL_TILE) if sizes["dims"] == 128 else sizes["tile"]


def split_launch(rows: int, dims: int, tile: int) -> dict[str, int | None]:
    """Return the launch options of the split kernel. rows: packed and padded rows of a unit."""
    return {
        "num_warps": 4,
        "num_stages": _STAGES_AHEAD if dims <= 128 else 3,
        "maxnreg": _REGISTERS.get(programs_at_once(rows, dims, tile)),
    }


def combine_launch(dims: int) -> dict[str, int]:
    """Return the launch options of the kernel that combines splits: as little as possible, so that all rows run at once."""
    return {"few": FEW_SPLITS, "many": MANY_SPLITS, "num_warps": max(1, dims // 128)}


def store_launch(num_kv_heads: int, head_dim: int) -> dict[str, int]:
    """Return padded sizes and warps of the kernel that stores KV: eight elements per thread, within 1 to 8 warps."""
    heads = 1 << (num_kv_heads - 1).bit_length()
    dims = power_of_two(head_dim)
    return {"heads": heads, "dims": dims, "num_warps": min(8, max(1, heads * dims // 256))}


def chunk_rows(dtype: torch.dtype, head_dim: int) -> int:
    """Return the packed rows of a unit of a short chunk."""
    sizes = sizes_of(dtype, head_dim)
    return min(_MOST_CHUNK_ROWS if sizes["dims"] <= 128 else _MOST_CHUNK_ROWS // 2, sizes["tokens"])


def programs_at_once(rows: int, dims: int, tile: int) -> int:
    """Return the programs of the split kernel that one multiprocessor holds. rows: packed and padded rows of a unit."""
    if rows > _LEAST_ROWS or dims > 128:
        return 2
    return 4 if tile == _SMALL_TILE else 3


def splits_joined(num_units: int, num_programs: int) -> int:
    """Return how many splits a program of a decode reads in one loop: several, if runs of them occupy all programs.

    num_units: with each KV head counted. A loop that goes on loads ahead across the border of two splits.
    """
    return JOINED_SPLITS if 2 * num_units >= num_programs else 1


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; for the interpreter, some number."""
    if device.type != "cuda":
        return _MULTIPROCESSORS_OF_INTERPRETER
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def precision_of(dtype: torch.dtype) -> str:
    """Return the precision of products: float32 without TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def power_of_two(size: int) -> int:
    """Return the smallest power of two from ``size`` on that the tensor cores support."""
    return max(_LEAST_ROWS, 1 << (size - 1).bit_length())
