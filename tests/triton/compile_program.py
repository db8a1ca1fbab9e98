"""A program that compiles our kernels without the interpreter and prints what each uses on the GPU, as JSON.

It needs no GPU. The argument is the compute capability: 90.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention import triton_kernels as attention
from engine.attention.triton_sizes import (
    COMBINED_AT_ONCE,
    chunk_rows,
    power_of_two,
    precision_of,
    programs_at_once,
    sizes_of,
    split_launch,
    store_launch,
)
from engine.fused import triton_kernels as fused
from engine.fused.rows import num_warps_of
from engine.kv_cache import folding
from engine.kv_cache.triton_kernels import fold_kernel
from engine.sampling import triton_kernels as draw
from engine.sampling.triton_draw import NUM_WARPS, REACH, TILE

STATES = (
    "query", "output", "cache", "key", "value",
    "states", "added", "weight", "normed", "packed", "cos", "sin", "query_norm", "key_norm",
)  # fmt: skip
FLOATS = {"partial": "*fp32", "logs": "*fp32", "scale": "fp32", "eps": "fp32"}
HIDDEN = 4096
GROUP = 7
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
WARP_SIZE = 32


def compiled(
    kernel: Any, dtype: torch.dtype, head_dim: int, target: GPUTarget, kept: int = GROUP
) -> dict[str, Any]:
    """Return the bytes of shared memory and stack (spilled registers), and which instructions for speed are used.

    kept: packed rows of a unit. in_flight: the copies into shared memory that may be unfinished while a tile is computed.
    """
    sizes = sizes_of(dtype, head_dim)
    options = {}
    if kernel is attention.prefill_kernel:
        options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    elif kernel is attention.split_kernel:
        options = split_launch(sizes["dims"])
    elif kernel is attention.store_kernel:
        launch = store_launch(4, head_dim)
        options = {"num_warps": launch["num_warps"]}
        sizes["heads"] = launch["heads"]
    elif kernel is fused.norm_kernel:
        options = {"num_warps": num_warps_of(HIDDEN)}
    constants = {
        "heads": 16, **sizes, "group": GROUP, "window": 1000, "cap": 50.0, "block_size": 16, "kept": kept,
        "rows": power_of_two(kept), "at_once": COMBINED_AT_ONCE, "precision": precision_of(dtype), "size": HIDDEN,
        "padded": HIDDEN, "has_added": True, "num_heads": 28, "num_kv_heads": 4, "half": head_dim // 2, "has_norm": True,
    }  # fmt: skip
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: _kind(name, constants, NAMES[dtype]) for name in names}
    aligned = [
        n for n in names if (signature[n].startswith("*") and signature[n] != "*i32") or n.endswith("stride")
    ]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    result = triton.compile(source, target=target, options=options)
    is_persistent = kernel is attention.split_kernel
    at_once = programs_at_once(power_of_two(kept), sizes["dims"]) if is_persistent else 1
    return {
        "dtype": NAMES[dtype], "head_dim": head_dim, "varying": _varying(kernel), "at_once": at_once,
        **_used(kernel, result),
    }  # fmt: skip


def compiled_draw(kernel: Any, target: GPUTarget) -> dict[str, Any]:
    """Return the same for a kernel that draws tokens."""
    constants = {"scale": 2**40, "uniform_bits": 53, "tile": TILE, "reach": REACH}
    names = kernel.arg_names
    kinds = {
        "scores": "*fp32",
        "temperatures": "*fp64",
        "shares": "*fp64",
        "row_stride": "i32",
        "size": "i32",
    }
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*i64") for name in names}
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    result = triton.compile(
        ASTSource(kernel, signature, values), target=target, options={"num_warps": NUM_WARPS}
    )
    return {"dtype": "fp64", "head_dim": 0, "varying": [], "at_once": 1, **_used(kernel, result)}


def compiled_fold(target: GPUTarget) -> dict[str, Any]:
    """Return the same for the kernel that digests blocks. loads_ahead: the loads of a thread before its first product."""
    constants = {**folding.STEPS, "tile": folding.TILE, "num_tiles": folding.NUM_TILES}
    names = fold_kernel.arg_names
    kinds = dict.fromkeys(constants, "constexpr") | {"words": "*i64", "packed": "*i64"}
    signature = {name: kinds.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fold_kernel, signature, values)
    result = triton.compile(source, target=target, options={"num_warps": folding.NUM_WARPS})
    masked = result.asm["ptx"].partition("@%p")[2]
    return {
        "dtype": "int64",
        "head_dim": 0,
        "varying": [each.name for each in fold_kernel.params[2:6] if not each.do_not_specialize],
        "at_once": 1,
        "loads_ahead": masked.partition("mul.lo")[0].count("ld.global.b64"),
        **_used(fold_kernel, result),
    }


def _used(kernel: Any, result: Any) -> dict[str, Any]:
    return {
        "kernel": kernel.__name__,
        "threads": result.metadata.num_warps * WARP_SIZE,
        "registers": _resource("REG", result.asm["cubin"]),
        "shared": result.metadata.shared,
        "stack": _resource("STACK", result.asm["cubin"]),
        "tensor_cores": len(re.findall("mma.sync|wgmma.mma_async", result.asm["ptx"])),
        "widest_store": max(map(_width, re.findall(r"st\.global\.(\S+)", result.asm["ptx"])), default=0),
        "copies_ahead": len(re.findall("cp.async.cg", result.asm["ptx"])),
        "in_flight": max(map(int, re.findall(r"async_wait.*num = (\d+)", result.asm["ttgir"])), default=0),
    }


def _width(store: str) -> int:
    """Return the bits of a store such as ``v4.b32``."""
    vector = re.match(r"v(\d)\.", store)
    return int(vector[1] if vector else 1) * int(re.findall(r"[bfsu](\d+)", store)[0])


def _kind(name: str, constants: dict[str, Any], dtype: str) -> str:
    if name in constants:
        return "constexpr"
    if name in STATES:
        return f"*{dtype}"
    return FLOATS.get(name, "i32" if name.endswith("stride") else "*i32")


def _varying(kernel: Any) -> list[str]:
    """Return vectors of integers for which some alignments would be compiled separately."""
    return [
        each.name
        for each in kernel.params
        if _kind(each.name, {}, "") == "*i32"
        and not each.is_constexpr
        and not each.do_not_specialize_on_alignment
    ]


def _resource(name: str, cubin: bytes) -> int:
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(rf"{name}:(\d+)", output)[0])


def main() -> None:
    """Compile for the sizes of most models, of the golden tests (float32), and of Gemma."""
    target = GPUTarget("cuda", int(sys.argv[1]), WARP_SIZE)
    for dtype, head_dim in (
        (torch.bfloat16, 128),
        (torch.float32, 128),
        (torch.bfloat16, 256),
        (torch.bfloat16, 64),
    ):
        for kernel in (
            attention.store_kernel,
            attention.prefill_kernel,
            attention.split_kernel,
            attention.combine_kernel,
            fused.norm_kernel,
            fused.turn_kernel,
            fused.gate_kernel,
        ):
            sys.stdout.write(json.dumps(compiled(kernel, dtype, head_dim, target)) + "\n")
        kept = chunk_rows(dtype, head_dim)
        sys.stdout.write(json.dumps(compiled(attention.split_kernel, dtype, head_dim, target, kept)) + "\n")
    for kernel in (draw.weigh_kernel, draw.choose_kernel):
        sys.stdout.write(json.dumps(compiled_draw(kernel, target)) + "\n")
    sys.stdout.write(json.dumps(compiled_fold(target)) + "\n")


if __name__ == "__main__":
    main()
