"""A decoder whose forward pass is one call of the kernels, and sampling by them, row by row, without copies."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contract.errors import InternalError
from engine.compute.inputs import PreparedInputs
from engine.connector import LayerWatch
from engine.kernels.binding import DRAW, CStep, Kernels, Stored, address_of
from engine.kernels.packed import PackedWeights, addresses
from engine.models.config import DecoderConfig
from engine.models.decoder import CausalLM
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import Draw, Samples, Sampling, best_or_drawn

_LINE = 64
_SEEDS = 2**128


def why_unserved(config: DecoderConfig, dtype: str, device: torch.device, num_ranks: int) -> str | None:
    """Return why the kernels cannot compute this model, else None."""
    if device.type != "cpu" or dtype != "bfloat16":
        return f"they compute bfloat16 on the host, and this is {dtype} on {device.type}"
    if num_ranks > 1:
        return f"they compute whole models, and this one is divided among {num_ranks} ranks"
    if config.experts is not None:
        return "they compute no experts"
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": config.head_dim,
    }
    odd = [f"{name} is {size}" for name, size in sizes.items() if size % 32]
    return f"they take multiples of 32, and {odd[0]}" if odd else None


class KernelDecoder:
    """Owns the threads, the packed weights and the buffers of one model. ``close`` it.

    The result of a token's row does not depend on other rows, bit for bit.
    """

    serves_groups = False

    def __init__(
        self,
        model: CausalLM,
        config: DecoderConfig,
        kernels: Kernels,
        *,
        num_threads: int,
        cores: Sequence[int] = (),
        block_size: int,
        max_length: int,
    ) -> None:
        self._kernels = kernels
        self._config = config
        self._block_size = block_size
        self._threads = kernels.start_threads(num_threads, cores[1:num_threads])
        self.draw: Draw = KernelDraw(kernels, self._threads, num_threads)
        self._weights = PackedWeights(model, config, max_length, kernels, self._threads)
        self._head = _Head(model, config.vocab_size, kernels, self._threads, self._weights)
        self._buffers = _Buffers(config, kernels.scratch_bytes(self._weights.model) * num_threads)
        self._pool: _Pool | None = None
        # Keeps the inputs of a running step alive while the kernels read them.
        self._in_flight: Any = None

    @property
    def runs_ahead(self) -> bool:
        """Return False: tokens are sampled on the host."""
        return False

    def forward(
        self, inputs: PreparedInputs, caches: Sequence[Tensor] | None, watch: LayerWatch | None = None
    ) -> Tensor:
        """Return final hidden states ``[num_tokens, hidden_size]``, valid until the next call; without caches no KV is kept.

        Raises InternalError where it was interrupted.
        """
        states = self.begin(inputs, caches, watch)()
        if states is None:
            raise InternalError("a forward pass was interrupted that is needed")
        return states

    def begin(
        self,
        inputs: PreparedInputs,
        caches: Sequence[Tensor] | None,
        watch: LayerWatch | None = None,
        *,
        may_be_interrupted: bool = False,
    ) -> Callable[[], Tensor | None]:
        """See ForwardPass. Meanwhile Python's lock is free, but for what the watch does with it."""
        num_tokens = inputs.num_tokens
        self._buffers.reserve(num_tokens)
        if caches is None:  # nothing is kept: one block that all layers write
            shape = (1, 2, self._config.num_kv_heads, self._block_size, self._config.head_dim)
            caches = [torch.zeros(shape, dtype=torch.bfloat16)] * self._config.num_layers
        if self._pool is None or self._pool.caches is not caches:  # derived once for each pool of the engine
            self._pool = _Pool(caches, addresses(caches), caches[0].stride(0))
        pool = self._pool
        reports = _WatchCallback(watch)
        step = CStep(
            num_tokens,
            inputs.num_reqs,
            self._block_size,
            inputs.block_table.shape[1],
            address_of(inputs.input_ids),
            address_of(inputs.positions),
            address_of(inputs.query_start_loc),
            address_of(inputs.seq_lens),
            address_of(inputs.num_wanted),
            address_of(inputs.block_table),
            address_of(inputs.slot_mapping),
            pool.addresses,
            pool.block_stride,
            *self._buffers.addresses,
            self._weights.pointer,
            reports.callback,
            may_be_interrupted,
        )
        self._kernels.launch(self._threads, step)

        def finish() -> Tensor | None:
            is_whole = self._kernels.wait(self._threads)
            self._in_flight = None
            reports.check()
            return self._buffers.normed[:num_tokens] if is_whole else None

        self._in_flight = inputs, caches, step, reports
        return finish

    def interrupt(self) -> None:
        """See ForwardPass."""
        self._kernels.interrupt(self._threads)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits ``[num_rows, vocab_size]`` of hidden states: float32, rounded to bfloat16."""
        return self._head.logits(states)

    def best_tokens(self, logits: Tensor) -> Sampling | None:
        """Return the best token of each row; see ForwardPass."""
        best = self._head.best_tokens(logits)
        return None if best is None else Sampling(lambda: Samples(best, [0] * len(best), None))

    def reserve(self, caches: Sequence[Tensor]) -> None:
        """Do nothing: on the host nothing is measured."""

    def capture(self, caches: Sequence[Tensor]) -> None:
        """Do nothing: the kernels have no graphs."""

    def close(self) -> None:
        """End the threads and release the pool. A running forward pass ends first."""
        self._kernels.end_threads(self._threads)
        self._pool = self._in_flight = None


class _Buffers:
    """The memory in which the kernels compute: a row a token, which grows as needed, and scratch memory.

    addresses: as ``CStep`` has them. normed: the final hidden states.
    """

    def __init__(self, config: DecoderConfig, scratch_bytes: int) -> None:
        heads = config.num_heads + 2 * config.num_kv_heads
        self._widths = (
            config.hidden_size,
            config.hidden_size,
            heads * config.head_dim,
            config.num_heads * config.head_dim,
            config.intermediate_size,
        )
        self._scratch = torch.empty(scratch_bytes + _LINE, dtype=torch.uint8)
        self._num_rows = 0
        self.reserve(1)

    def reserve(self, num_rows: int) -> None:
        """Make sure that there are ``num_rows`` rows. If there were fewer, their content is lost."""
        if num_rows <= self._num_rows:
            return
        self._num_rows = num_rows
        self._rows = [torch.empty(num_rows, width, dtype=torch.bfloat16) for width in self._widths]
        self.normed = self._rows[1]
        scratch = -(-self._scratch.data_ptr() // _LINE) * _LINE
        self.addresses = [*(rows.data_ptr() for rows in self._rows), scratch]


class _Head:
    """The output head, which also finds the best token of each row."""

    def __init__(
        self, model: CausalLM, vocab_size: int, kernels: Kernels, threads: int, weights: PackedWeights
    ) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._kernels = kernels
        self._threads = threads
        self._weights = weights
        self._logits: Tensor | None = None
        self._best: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of hidden states."""
        if self._weights.head is None:
            return self._model.logits(states)
        num_rows = states.shape[0]
        logits = torch.empty(num_rows, self._vocab_size)
        best = np.empty(num_rows, dtype=np.int64)
        self._kernels.linear(self._threads, self._weights.head, states.contiguous(), logits, best)
        self._logits = logits
        self._best = best
        return logits

    def best_tokens(self, logits: Tensor) -> list[int | None] | None:
        """Return the best tokens of the newest logits; None for other logits, or if a row has none."""
        if logits is not self._logits:
            return None
        tokens: list[int | None] = self._best.tolist()
        return None if -1 in tokens else tokens


@dataclass(frozen=True)
class _Pool:
    caches: Sequence[Tensor]
    addresses: "ctypes.Array[ctypes.c_void_p]"
    block_stride: int


class _WatchCallback:
    """Passes stored layers to a watch, and keeps its error: C cannot propagate it."""

    def __init__(self, watch: LayerWatch | None) -> None:
        self._watch = watch
        self._error: BaseException | None = None
        self.callback = Stored() if watch is None else Stored(self._report)

    def check(self) -> None:
        """Raise the error that the watch raised, if any."""
        if self._error is not None:
            raise self._error

    def _report(self, num_layers: int) -> None:
        if self._watch is None or self._error is not None:
            return
        try:
            self._watch.on_stored(num_layers)
        except BaseException as error:  # noqa: BLE001 raised again by check
            self._error = error


class KernelDraw:
    """See ``engine.sampling.sampler.Draw``. threads: the kernels' threads; None: the caller samples alone."""

    def __init__(self, kernels: Kernels, threads: int | None = None, num_threads: int = 1) -> None:
        self._kernels = kernels
        self._threads = threads
        self._num_threads = num_threads
        self._scratch: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __call__(self, scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Sample from float32 ``[num_rows, vocab_size]`` on the host."""
        return best_or_drawn(self.random, scores, rows)

    def random(self, scores: Tensor, rows: Sequence[SamplingRow], places: Sequence[int]) -> Tensor:
        """See ``engine.sampling.sampler.RandomDraw``."""
        scores = scores.contiguous()
        size = scores.shape[1]
        needed = self._num_threads * self._kernels.draw_scratch(size)
        if len(self._scratch) < needed:
            self._scratch = np.empty(needed, dtype=np.int64)
        tokens = np.empty(len(places), dtype=np.int64)
        draws = np.zeros(len(places), dtype=DRAW)
        drawn = [rows[place] for place in places]
        seeds = [row.sampling.seed % _SEEDS for row in drawn]
        draws["seed"] = [(seed % 2**64, seed // 2**64) for seed in seeds]
        draws["position"] = [row.position for row in drawn]
        for name in ("temperature", "min_p", "top_p", "top_k"):
            draws[name] = [getattr(row.sampling, name) for row in drawn]
        draws["scores"] = scores.data_ptr() + np.array(places) * (size * scores.element_size())
        self._kernels.draw(self._threads, draws, size, self._scratch, tokens)
        return torch.from_numpy(tokens)
