"""Measures the linear layers of a checkpoint in oneDNN with packed weights, without the rest of a decode step.

It is a bound for engines that call oneDNN for every linear layer.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.others import watch_use
from benchmarks.samples import sample

_REPEATS = 3


class PackedLinears:
    """Packed random bfloat16 weights of these shapes ``[outputs, inputs]``, as large as the model's."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        pack = torch.ops.mkldnn._reorder_linear_weight
        self._layers = [
            (inputs, pack(torch.rand(outputs, inputs).bfloat16(), 1)) for outputs, inputs in shapes
        ]

    def sample(self, num_rows: int, num_threads: int) -> dict[str, Any]:
        """Return tokens per second of steps with ``num_rows`` tokens each, and the use by other processes meanwhile."""
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            self._step(num_rows)
            with watch_use() as use:
                begin = time.perf_counter()
                for _ in range(_REPEATS):
                    self._step(num_rows)
                seconds = time.perf_counter() - begin
        finally:
            torch.set_num_threads(before)
        return sample(_REPEATS * num_rows / seconds, use)

    @torch.inference_mode()
    def _step(self, num_rows: int) -> None:
        states = {inputs: torch.ones(num_rows, inputs, dtype=torch.bfloat16) for inputs, _ in self._layers}
        for inputs, weight in self._layers:
            torch.ops.mkldnn._linear_pointwise(states[inputs], weight, None, "none", [], "")
