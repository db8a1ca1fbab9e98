"""What the machine allows an engine: how fast memory is read, and how fast torch multiplies bfloat16 matrices.

A decode step reads every weight that it multiplies once, so it takes at least ``weight_bytes`` over the bandwidth, and at
least its floating-point operations over the matrix rate. What the KV cache adds is left out: the limit is a little generous.
A weight counts as the 16 bits of the checkpoint: an engine that keeps fewer can pass the limit.
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
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*_proj)\.weight")
_MATRIX = (1024, 896, 4864)
_NUM_MATRICES = 2


@dataclass(frozen=True)
class Weights:
    """Of a checkpoint: the bytes that one decode step reads, and the weights that a token is multiplied with.

    num_in_head: those of them that only a token that draws another is multiplied with; num_behind_kv: and those behind the
    last layer's keys and values. linears: the shapes of all of them, ``(outputs, inputs)``.
    """

    num_bytes: int
    num_multiplied: int
    num_in_head: int
    num_behind_kv: int = 0
    linears: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, model: Path) -> "Weights":
        """Read off the headers of the folder's safetensors files. An embedding that is no head is looked up, not read."""
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
    """Of some moment: bytes of memory read and floating-point operations of bfloat16 products, each per second."""

    read_bytes: float
    flops: float

    def seconds_per_step(self, weights: Weights, num_rows: int) -> float:
        """The least that a step of ``num_rows`` tokens takes, with memory and arithmetic perfectly overlapped."""
        by_memory = weights.num_bytes / self.read_bytes
        by_arithmetic = 2 * weights.num_multiplied * num_rows / self.flops
        return max(by_memory, by_arithmetic)

    def prompt_tokens_per_second(self, weights: Weights) -> float:
        """The most prompt tokens that can be computed in a second, attention left out."""
        num_needed = weights.num_multiplied - weights.num_in_head - weights.num_behind_kv
        return self.flops / (2 * num_needed)


class Machine:
    """Finds its limits again and again: neighbours change them. Raises NotCompiledError without a C compiler."""

    def __init__(self, num_threads: int, num_bytes: int = 2**30) -> None:
        self._num_threads = num_threads
        self._read = _LIBRARY.load().read_words
        self._read.restype = ctypes.c_uint64
        self._read.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._words = np.ones(num_bytes // 8, dtype=np.uint64)

    def read_bytes(self, repeats: int = 5) -> float:
        """Per second, by all threads; the median of so many readings."""
        share = len(self._words) // self._num_threads // _LANES * _LANES

        def part(index: int) -> None:
            self._read(self._words.ctypes.data + index * share * 8, share)

        seconds = statistics.median(_side_by_side(part, self._num_threads) for _ in range(repeats))
        return share * 8 * self._num_threads / seconds

    def flops(self, repeats: int = 5) -> float:
        """Per second, by all threads; the best of so many products."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            return _flops(repeats)
        finally:
            torch.set_num_threads(before)


def _side_by_side(work: Callable[[int], Any], num_threads: int) -> float:
    """Seconds in which every thread has done its part."""
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
    """The last layer's linear layers but those that make keys and values."""
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
