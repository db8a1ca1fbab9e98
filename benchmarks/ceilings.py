"""The machine's limits for an engine: memory bandwidth, and torch's rate of bfloat16 matrix products.

A decode step reads every weight once, so it takes at least ``weight_bytes`` over the bandwidth, and at least its
floating-point operations over the matrix rate. The KV cache is ignored, so the limit is slightly too high. A weight counts
as the checkpoint's 16 bits: an engine with smaller weights can exceed the limit.
"""

import ctypes
import json
import re
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from native.compiling import CLibrary

_LIBRARY = CLibrary("read", Path(__file__).parent / "native", ("-O3", "-march=native"))
_LANES = 64
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*_proj)\.weight")
_MATRIX = (1024, 896, 4864)
_NUM_MATRICES = 2


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint: the bytes that one decode step reads, and the number that a token is multiplied with.

    num_in_head: weights that are used only for tokens whose successor is sampled. num_behind_kv: weights after the last
    layer's keys and values. linears: shapes of all linear layers, ``(outputs, inputs)``.
    """

    num_bytes: int
    num_multiplied: int
    num_in_head: int
    num_behind_kv: int = 0
    linears: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, model: Path) -> "Weights":
        """Read the headers of the folder's safetensors files. An embedding that is not the head is not read in a step."""
        shapes = {name: shape for file in model.glob("*.safetensors") for name, shape in _shapes(file)}
        head = shapes.get(_HEAD, shapes[_EMBEDDING])
        if _HEAD in shapes:
            del shapes[_EMBEDDING]
        return cls(
            num_bytes=sum(2 * prod(shape) for shape in shapes.values()),
            num_multiplied=sum(prod(shape) for shape in shapes.values() if len(shape) > 1),
            num_in_head=prod(head),
            num_behind_kv=sum(prod(shapes[name]) for name in _behind_kv(shapes)),
            linears=tuple((shape[0], shape[1]) for shape in shapes.values() if len(shape) == 2),
        )


@dataclass(frozen=True)
class Ceilings:
    """Limits at one time: bytes read from memory, and floating-point operations of bfloat16 products, per second."""

    read_bytes: float
    flops: float

    def seconds_per_step(self, weights: Weights, num_rows: int) -> float:
        """Return the minimum time of a step of ``num_rows`` tokens, with perfect overlap of memory and arithmetic."""
        by_memory = weights.num_bytes / self.read_bytes
        by_arithmetic = 2 * weights.num_multiplied * num_rows / self.flops
        return max(by_memory, by_arithmetic)

    def prompt_tokens_per_second(self, weights: Weights) -> float:
        """Return the maximum prompt tokens per second, without attention."""
        num_needed = weights.num_multiplied - weights.num_in_head - weights.num_behind_kv
        return self.flops / (2 * num_needed)


class Machine:
    """Measures the machine's limits, which other tenants change. Raises NotCompiledError without a C compiler."""

    def __init__(self, num_threads: int, num_bytes: int = 2**30) -> None:
        self._num_threads = num_threads
        self._read = _LIBRARY.load().read_words
        self._read.restype = ctypes.c_uint64
        self._read.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._words = np.ones(num_bytes // 8, dtype=np.uint64)

    def read_bytes(self, repeats: int = 5) -> float:
        """Return the bytes read per second by all threads: the median of ``repeats`` measurements."""
        share = len(self._words) // self._num_threads // _LANES * _LANES

        def part(index: int) -> None:
            self._read(self._words.ctypes.data + index * share * 8, share)

        seconds = statistics.median(_run_threads(part, self._num_threads) for _ in range(repeats))
        return share * 8 * self._num_threads / seconds

    def flops(self, repeats: int = 5) -> float:
        """Return the operations per second of all threads: the best of ``repeats`` products."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            return _flops(repeats)
        finally:
            torch.set_num_threads(before)


def _run_threads(work: Callable[[int], Any], num_threads: int) -> float:
    """Run ``work`` in all threads and return the seconds until the last one has ended."""
    barrier = threading.Barrier(num_threads + 1)

    def run(index: int) -> None:
        barrier.wait()
        work(index)
        barrier.wait()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    barrier.wait()
    begin = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - begin
    for thread in threads:
        thread.join()
    return seconds


def _flops(repeats: int) -> float:
    rows, inputs, outputs = _MATRIX
    states = torch.ones(rows, inputs, dtype=torch.bfloat16)
    weights = [torch.ones(outputs, inputs, dtype=torch.bfloat16) for _ in range(_NUM_MATRICES)]
    seconds = []
    for _ in range(repeats + 1):  # the first one is a warm-up
        begin = time.perf_counter()
        for weight in weights:
            torch.nn.functional.linear(states, weight)
        seconds.append(time.perf_counter() - begin)
    return 2.0 * rows * inputs * outputs * len(weights) / min(seconds[1:])


def _behind_kv(names: Iterable[str]) -> list[str]:
    """Return the last layer's linear layers except those of keys and values."""
    layers = [(int(found[1]), found[2]) for name in names if (found := _LAYER.fullmatch(name))]
    last = max((number for number, _ in layers), default=0)
    return [
        f"model.layers.{last}.{linear}.weight"
        for number, linear in layers
        if number == last and not linear.endswith((".k_proj", ".v_proj"))
    ]


def _shapes(file: Path) -> list[tuple[str, list[int]]]:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header: dict[str, Any] = json.loads(opened.read(length))
    return [(name, tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"]
