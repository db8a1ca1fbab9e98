"""Builds the FlashInfer modules that the GPU's tests and benchmarks use, on a machine that has nvcc and may have no GPU.

FlashInfer compiles a module at its first use, the slowest for minutes. The calls on a rented machine unpack them instead.
FLASHINFER_CUDA_ARCH_LIST names the GPU (9.0a: H100, H200), MAX_JOBS how many files are compiled at once.

    python -m benchmarks.gpu_modules .whl/kernels.zip
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import torch

HEAD_DIM = 128
"""Llama 3.1 8B, Qwen 2.5 1.5B and the tests of this backend have it; all compute in bfloat16."""
_PREFILL_KERNELS = ("fa2", "fa3")
_FOLDER = "aot"


def specs() -> list[Any]:
    """Return FlashInfer's descriptions of the modules: each kernel with and without a sliding window."""
    modules = import_module("flashinfer.jit.attention.modules")
    found = [import_module("flashinfer.jit.page").gen_page_module()]
    number_formats = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
    for has_window in (False, True):
        sizes = (HEAD_DIM, HEAD_DIM, 0, has_window, False)  # positions are encoded before; no soft cap
        found.append(modules.gen_batch_decode_module(*number_formats, *sizes))
        found += [
            modules.gen_batch_prefill_module(kernel, *number_formats, *sizes, False)
            for kernel in _PREFILL_KERNELS
        ]
    return found


def build(archive: Path) -> None:
    """Compile all modules into ``archive``, from which FlashInfer loads them if it is unpacked in its folder ``data``."""
    with ZipFile(archive, "w", ZIP_DEFLATED) as file:
        for spec in specs():
            spec.build(verbose=False)
            file.write(spec.jit_library_path, f"{_FOLDER}/{spec.name}/{spec.name}.so")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
