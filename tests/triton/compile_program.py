"""A program that compiles our kernels without the interpreter and prints what each uses on the GPU, as JSON.

It needs no GPU. The argument is the compute capability: 90. A second one compiles the kernels of attention alone.
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
from engine.attention import triton_splits as splits
from engine.attention.triton_sizes import (
    chunk_rows,
    combine_launch,
    decode_tile,
    power_of_two,
    precision_of,
    programs_at_once,
    sizes_of,
    split_launch,
    store_launch,
)
from engine.compute import best_tokens
from engine.compute.triton_kernels import KEYS_AT_ONCE, best_kernel, tokens_kernel
from engine.fused import triton_kernels as fused
from engine.fused import triton_rope as turn
from engine.fused.rows import num_warps_of, rope_launch
from engine.kv_cache import memory
from engine.kv_cache.triton_kernels import fold_kernel
from engine.sampling import triton_choosing, triton_draw, triton_search
from engine.sampling import triton_kernels as draw

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
    kernel: Any,
    dtype: torch.dtype,
    head_dim: int,
    target: GPUTarget,
    kept: int = GROUP,
    *,
    is_joined: bool = False,
) -> dict[str, Any]:
    """Return the bytes of shared memory and stack (spilled registers), and which instructions for speed are used.

    kept: packed rows of a unit. is_joined: for the split kernel. in_flight: the copies into shared memory that may be
    unfinished while a tile is computed.
    """
    sizes = sizes_of(dtype, head_dim)
    options: dict[str, int | None] = {}
    if kernel is attention.prefill_kernel:
        options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    elif kernel is splits.split_kernel:
        sizes["tile"] = decode_tile(dtype, head_dim) if kept == GROUP else sizes["tile"]
        options = split_launch(power_of_two(kept), sizes["dims"], sizes["tile"])
    elif kernel is attention.store_kernel:
        launch = store_launch(4, head_dim)
        options = {"num_warps": launch["num_warps"]}
        sizes["heads"] = launch["heads"]
    elif kernel is turn.rope_kernel:
        launch = rope_launch(head_dim)
        options = {"num_warps": launch["num_warps"]}
        sizes["heads"] = launch["heads"]
    elif kernel is splits.combine_kernel:
        launch = combine_launch(sizes["dims"])
        options = {"num_warps": launch.pop("num_warps")}
        sizes |= launch
    elif kernel is fused.norm_kernel:
        options = {"num_warps": num_warps_of(HIDDEN)}
    constants = {
        "heads": 16, **sizes, "overlaps": True, "group": GROUP, "window": 1000, "cap": 50.0, "block_size": 16, "kept": kept,
        "rows": power_of_two(kept), "is_joined": is_joined, "precision": precision_of(dtype), "size": HIDDEN,
        "padded": HIDDEN, "has_added": True, "num_heads": 28, "num_kv_heads": 4, "half": head_dim // 2, "has_norm": True,
    }  # fmt: skip
    constants["is_decode"] = kept == GROUP
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
    is_persistent = kernel is splits.split_kernel
    at_once = programs_at_once(power_of_two(kept), sizes["dims"], sizes["tile"]) if is_persistent else 1
    return {
        "dtype": NAMES[dtype], "head_dim": head_dim, "varying": _varying(kernel), "at_once": at_once,
        **used(kernel, result),
    }  # fmt: skip


def compiled_draw(
    kernel: Any, tile: int, num_warps: int, target: GPUTarget, **options: int
) -> dict[str, Any]:
    """Return the same for a kernel that draws tokens."""
    constants = {
        "scale": triton_draw.SCALE, "has_bounds": True, "fineness": triton_draw.FINENESS, "bins": triton_draw.BINS,
        "room": triton_draw.ROOM, "parts": 64, "length": 8192, "tile": tile,
    }  # fmt: skip
    kinds = {
        "scores": "*fp32", "highest": "*fp32", "sums": "*fp32", "counts": "*i32", "plans": "*fp64", "modes": "*i32",
        "row_stride": "i32", "size": "i32", "num_rows": "i32", "num_parts": "i32",
    }  # fmt: skip
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*i64") for name in names}
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    aligned = [name for name in names if signature[name].startswith("*") or name in ("row_stride", "size")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, values, attributes)
    result = triton.compile(source, target=target, options={"num_warps": num_warps, **options})
    varying = [
        each.name
        for each in kernel.params
        if each.name.startswith("num_") and not (each.is_constexpr or each.do_not_specialize)
    ]
    return {"dtype": "fp64", "head_dim": 0, "varying": varying, "at_once": 1, **used(kernel, result)}


def compiled_best(target: GPUTarget, *, finds_keys: bool) -> dict[str, Any]:
    """Return the same for the kernel that finds best tokens, with rows of a multiple of 16 logits."""
    names = best_kernel.arg_names
    kinds = {"logits": "*bf16", "counters": "*i32", "row_stride": "i32", "size": "i32", "first_token": "i32"}
    values = {"tile": best_tokens.TILE, "finds_keys": finds_keys, "overlaps": True}
    signature = {name: "constexpr" if name in values else kinds.get(name, "*i64") for name in names}
    source = ASTSource(
        best_kernel,
        signature,
        {(names.index(name),): value for name, value in values.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in ("logits", "row_stride", "size")},
    )
    result = triton.compile(source, target=target, options={"num_warps": best_tokens.NUM_WARPS})
    loads = result.asm["ptx"].count("ld.global.v4")
    return {
        "dtype": "bf16", "head_dim": 0, "varying": [], "at_once": 1, "loads_ahead": loads, **used(best_kernel, result)
    }  # fmt: skip


def compiled_tokens(target: GPUTarget) -> dict[str, Any]:
    """Return the same for the kernel that reads keys of best tokens."""
    names = tokens_kernel.arg_names
    values = {"tile": KEYS_AT_ONCE, "overlaps": True}
    signature = {
        name: "constexpr" if name in values else "i32" if name == "num_keys" else "*i64" for name in names
    }
    source = ASTSource(
        tokens_kernel, signature, {(names.index(name),): value for name, value in values.items()}
    )
    result = triton.compile(source, target=target)
    varying = [each.name for each in tokens_kernel.params[2:3] if not each.do_not_specialize]
    return {"dtype": "int64", "head_dim": 0, "varying": varying, "at_once": 1, **used(tokens_kernel, result)}


def compiled_fold(target: GPUTarget) -> dict[str, Any]:
    """Return the same for the kernel that digests blocks. loads_ahead: the loads of a thread before its first product."""
    constants = {**memory.STEPS, "tile": memory.TILE, "num_tiles": memory.NUM_TILES}
    names = fold_kernel.arg_names
    kinds = dict.fromkeys(constants, "constexpr") | {"words": "*i64", "packed": "*i64"}
    signature = {name: kinds.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fold_kernel, signature, values)
    result = triton.compile(source, target=target, options={"num_warps": memory.NUM_WARPS})
    masked = result.asm["ptx"].partition("@%p")[2]
    return {
        "dtype": "int64",
        "head_dim": 0,
        "varying": [each.name for each in fold_kernel.params[2:6] if not each.do_not_specialize],
        "at_once": 1,
        "loads_ahead": masked.partition("mul.lo")[0].count("ld.global.b64"),
        **used(fold_kernel, result),
    }


def used(kernel: Any, result: Any) -> dict[str, Any]:
    """Return the resources of a compiled kernel, and the instructions for speed that it uses."""
    before, _, _ = result.asm["ttgir"].partition("griddepcontrol.wait")
    return {
        "kernel": kernel.__name__,
        "waits": result.asm["ptx"].count("griddepcontrol.wait"),
        "early_stores": len(re.findall(r"tt\.(?:store|atomic)", before)),
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
    if len(sys.argv) > 2:
        kept = chunk_rows(torch.bfloat16, 128)
        for kernel in (attention.prefill_kernel, splits.split_kernel):
            sys.stdout.write(json.dumps(compiled(kernel, torch.bfloat16, 128, target, kept)) + "\n")
        return
    for dtype, head_dim in (
        (torch.bfloat16, 128),
        (torch.float32, 128),
        (torch.bfloat16, 256),
        (torch.bfloat16, 64),
    ):
        for kernel in (
            attention.store_kernel,
            attention.prefill_kernel,
            splits.split_kernel,
            splits.combine_kernel,
            fused.norm_kernel,
            turn.rope_kernel,
            fused.gate_kernel,
        ):
            sys.stdout.write(json.dumps(compiled(kernel, dtype, head_dim, target)) + "\n")
        kept = chunk_rows(dtype, head_dim)
        sys.stdout.write(json.dumps(compiled(splits.split_kernel, dtype, head_dim, target, kept)) + "\n")
        whole = compiled(splits.split_kernel, dtype, head_dim, target, is_joined=True)
        sys.stdout.write(json.dumps(whole) + "\n")
    for kernel, tile, num_warps, options in (
        (draw.survey_kernel, triton_draw.SURVEY_TILE, triton_draw.NUM_WARPS, {}),
        (draw.plan_kernel, 0, triton_draw.NUM_WARPS, {}),
        (draw.gather_kernel, triton_draw.TILE, triton_draw.NUM_WARPS, {}),
        (
            triton_choosing.choose_kernel,
            triton_draw.CHOOSING_TILE,
            triton_draw.CHOOSING_WARPS,
            {"maxnreg": triton_draw.CHOOSING_REGISTERS},
        ),
        (triton_search.search_kernel, triton_draw.CHOOSING_TILE, triton_draw.SEARCHING_WARPS, {}),
    ):
        sys.stdout.write(json.dumps(compiled_draw(kernel, tile, num_warps, target, **options)) + "\n")
    for finds_keys in (False, True):
        sys.stdout.write(json.dumps(compiled_best(target, finds_keys=finds_keys)) + "\n")
    sys.stdout.write(json.dumps(compiled_tokens(target)) + "\n")
    sys.stdout.write(json.dumps(compiled_fold(target)) + "\n")


if __name__ == "__main__":
    main()
