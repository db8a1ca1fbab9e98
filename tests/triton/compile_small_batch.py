"""A program that compiles products of small batches without the interpreter and prints what each uses on the GPU, as JSON.

It needs no GPU. The argument is the compute capability: 90.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.fused import small_batch_kernels
from engine.fused.small_batch_tiles import Form, Tiles, tiles_of
from tests.triton.compile_program import WARP_SIZE, used

SHAPES = {
    "llama": {Form.NORMED: (6144, 4096), Form.ADDED: (4096, 14336), Form.GATED: (28672, 4096), Form.PLAIN: (128256, 4096)},
    "qwen": {Form.NORMED: (2048, 1536), Form.ADDED: (1536, 8960), Form.GATED: (17920, 1536), Form.PLAIN: (151936, 1536)},
}  # fmt: skip
"""Outputs and inputs of products."""
KINDS = {"partial": "*fp32", "arrived": "*i32", "eps": "fp32"}
SIZES = ("num_rows", "num_inputs", "num_outputs", "share")


def compiled_few(form: Form, tiles: Tiles, target: GPUTarget) -> dict[str, Any]:
    """Return what the kernel of these tiles uses in bfloat16. overlaps: its instructions for the kernels beside it."""
    kernel: Any = small_batch_kernels.row_kernel if tiles.rows == 1 else small_batch_kernels.rows_kernel
    constants = {
        "rows": tiles.rows,
        "outputs": tiles.outputs,
        "inputs": tiles.inputs,
        "splits": tiles.splits,
        "stages": tiles.num_stages,
        "precision": "tf32",
        "has_norm": form in (Form.NORMED, Form.GATED),
        "has_bias": form is Form.NORMED,
        "has_residual": form is Form.ADDED,
        "is_gated": form is Form.GATED,
        "overlaps": True,
    }
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: _kind(name, constants) for name in names}
    aligned = [name for name in names if signature[name].startswith("*") or name in SIZES[1:]]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": tiles.num_warps, "launch_pdl": True}
    result = triton.compile(source, target=target, options=options)
    return {
        "form": form.name,
        "rows": tiles.rows,
        "widest_load": 128 if "ld.global.L1::evict_first.L2::cache_hint.v4" in result.asm["ptx"] else 0,
        "overlaps": result.asm["ptx"].count("griddepcontrol"),
        **used(kernel, result),
    }


def _kind(name: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    return "i32" if name in SIZES else KINDS.get(name, "*bf16")


def main() -> None:
    """Compile all that one, few and many rows of the measured models need."""
    target = GPUTarget("cuda", int(sys.argv[1]), WARP_SIZE)
    wanted = {
        (form, tiles)
        for sizes in SHAPES.values()
        for form, size in sizes.items()
        for num_rows in (1, 16, 64)
        if (tiles := tiles_of(form, num_rows, *size)) is not None
    }
    for form, tiles in wanted:
        sys.stdout.write(json.dumps(compiled_few(form, tiles, target)) + "\n")


if __name__ == "__main__":
    main()
