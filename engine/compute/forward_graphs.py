"""CUDA graphs: decode steps of some batch sizes are captured once and replayed, so that a step costs one launch.

A graph computes logits and each row's best token too, so a greedy step copies nothing but its tokens.

A step with other than one token a request, with more requests than the largest graph, or with a watch runs in pieces if
they are captured (``engine.compute.piecewise``), else as it is.
Several ranks capture the same graphs in the same order, their collectives included, and replay them together.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.backend import StaticDecode
from engine.compute.best_tokens import BestTokens, find_by_torch
from engine.compute.forward_plain import PlainForward
from engine.compute.inputs import PreparedInputs
from engine.compute.piecewise import PiecewiseGraphs
from engine.compute.recording import Recorder, Recording
from engine.compute.staging import begin_copy, copy_into, padded
from engine.connector import LayerWatch
from engine.sampling.sampler import Draw, Sampling, samples_of

logger = logging.getLogger(__name__)

_SMALL_SIZES = (1, 2, 4)
# Distances of the sizes, and the size up to which they apply.
_STEPS = ((8, 256), (16, 512), (32, 8192))


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return 1, 2, 4 and multiples of 8, above 256 of 16 and above 512 of 32, up to the first that holds ``max_num_seqs``.

    The last one is 8192. A larger step needs no closer size: padding adds at most a sixteenth to it.
    """
    sizes = list(_SMALL_SIZES)
    for step, last in _STEPS:
        sizes += range(sizes[-1] // step * step + step, last + 1, step)
    return [size for size, before in zip(sizes, [0, *sizes], strict=False) if before < max_num_seqs]


class _StaticTokens:
    """The token ids and positions that all graphs read, one column a request.

    sizes: those of the graphs. max_blocks: the columns of their block tables.
    """

    def __init__(self, sizes: Sequence[int], max_blocks: int, device: torch.device) -> None:
        self.sizes = sorted(sizes)
        self.max_blocks = max_blocks
        self.device = device
        self._tokens = torch.zeros(2, self.sizes[-1], dtype=torch.int32, device=device)

    def views(self, size: int) -> tuple[Tensor, Tensor]:
        """Return (token ids, positions) of the graph of this size."""
        input_ids, positions = self._tokens[:, :size]
        return input_ids, positions

    def fill(self, inputs: PreparedInputs) -> int:
        """Write the tokens of a step, padded with zeros; return the size of the graph that holds them."""
        size = next(size for size in self.sizes if size >= inputs.num_reqs)
        copy_into(list(self._tokens), [padded(inputs.input_ids, size), padded(inputs.positions, size)])
        if inputs.fed is not None:
            self._tokens[0, : inputs.num_reqs].copy_(inputs.fed)
        return size


class Head(Protocol):
    """Computes logits; see LanguageModel."""

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of these states."""

    def write_logits(self, states: Tensor, target: Tensor) -> None:
        """Write the same into ``target``."""


class StaticLogits:
    """A rank's logits, which all graphs write, and the best token of each row with 1 if it is a number, else 0."""

    def __init__(self, find_best: BestTokens = find_by_torch) -> None:
        self._find_best = find_best
        self._logits: Tensor | None = None
        self._best: Tensor | None = None

    def write(self, head: Head, states: Tensor) -> None:
        """Compute the logits of a step. The first call, before any capture, has the most rows."""
        num_rows = len(states)
        if self._logits is None or self._best is None:
            self._logits = torch.empty_like(head.logits(states))
            self._best = torch.zeros(num_rows, 2, dtype=torch.int64, device=states.device)
        logits = self._logits[:num_rows]
        head.write_logits(states, logits)
        best = self._best[:num_rows]
        self._find_best(logits, best)

    def first(self, num_rows: int) -> Tensor:
        """Return the logits of the first rows."""
        assert self._logits is not None
        return self._logits[:num_rows]

    def best_of(self, num_rows: int) -> Sampling:
        """Return the best tokens of the first rows, which are read before the next step overwrites them."""
        assert self._best is not None
        best = self._best[:num_rows]
        copied = begin_copy(best)
        return Sampling(lambda: samples_of(copied()), best.T)


@dataclass(frozen=True)
class _Graph:
    step: StaticDecode
    recording: Recording


@dataclass(frozen=True)
class _Replayed:
    """The results of the newest step; only these very tensors are recognized."""

    states: Tensor
    logits: Tensor


class GraphedForward:
    """Replays graphs where it can, else asks ``plain``; see ForwardPass.

    piece_sizes: the numbers of tokens for which steps with chunks are captured in pieces; none: they run as they are.
    find_best: finds the best tokens of this rank's logits; of several ranks, those of all ranks' logits.
    """

    serves_groups = False

    def __init__(
        self,
        plain: PlainForward,
        recorder: Recorder,
        *,
        sizes: Sequence[int],
        max_model_len: int,
        piece_sizes: Sequence[int] = (),
        has_head: bool = True,
        find_best: BestTokens = find_by_torch,
    ) -> None:
        self.draw: Draw = plain.draw
        self._plain = plain
        self._recorder = recorder
        self._static = _StaticTokens(sizes, -(-max_model_len // plain.block_size), plain.device)
        self._logits = StaticLogits(find_best) if has_head else None
        self._steps: dict[int, StaticDecode] = {}
        self._graphs: dict[int, _Graph] = {}
        self._pieces = PiecewiseGraphs(plain, recorder, piece_sizes) if piece_sizes else None
        self._caches: Sequence[Tensor] | None = None
        self._replayed: _Replayed | None = None

    @property
    def runs_ahead(self) -> bool:
        """See ForwardPass."""
        return self._plain.runs_ahead

    def best_tokens(self, logits: Tensor) -> Sampling | None:
        """See ForwardPass. They are computed in a replayed step."""
        if self._logits is None or self._replayed is None or logits is not self._replayed.logits:
            return None
        return self._logits.best_of(len(logits))

    def reserve(self, caches: Sequence[Tensor]) -> None:
        """See ForwardPass. Every static step runs once, and the largest is captured: the others find room in its memory.

        Steps in pieces are captured in all sizes, since the driver holds memory for each of their many graphs.
        """
        self._plain.reserve(caches)
        if not self._plan_steps():
            return
        largest = self._static.sizes[-1]
        for size in reversed(self._static.sizes):
            self._run(size, caches)
        recording = self._recorder.record(partial(self._run, largest, caches))
        self._graphs[largest] = _Graph(self._steps[largest], recording)
        if self._pieces is not None:
            self._pieces.capture(caches)

    def capture(self, caches: Sequence[Tensor]) -> None:
        """See ForwardPass. The largest first: the others find room in its memory."""
        start = time.monotonic()
        sizes = self._static.sizes
        if not self._plan_steps():
            logger.info("no CUDA graphs: the attention backend cannot be captured")
            return
        reserved = self._graphs  # its memory is used again while it is there
        self._graphs = {}
        for size in reversed(sizes):
            with torch.inference_mode():
                recording = self._recorder.record(partial(self._run, size, caches))
            self._graphs[size] = _Graph(self._steps[size], recording)
        reserved.clear()
        if self._pieces is not None:
            self._pieces.capture(caches)
        self._caches = caches
        seconds = time.monotonic() - start
        logger.info("%d CUDA graphs of 1..%d requests: %.1f s", len(sizes), sizes[-1], seconds)

    def _plan_steps(self) -> bool:
        """Make the static step of each size, the largest first; return False if the backend has none."""
        plain = self._plain
        for size in reversed(self._static.sizes):
            if size in self._steps:
                continue
            step = plain.backend.plan_static(size, self._static.max_blocks, plain.block_size, plain.device)
            if step is None:
                return False
            self._steps[size] = step
        return True

    def _run(self, size: int, caches: Sequence[Tensor]) -> Tensor:
        states: Tensor = self._plain.model(*self._static.views(size), self._steps[size], caches)
        if self._logits is not None:
            self._logits.write(self._plain.model, states)
        return states

    def forward(
        self, inputs: PreparedInputs, caches: Sequence[Tensor] | None, watch: LayerWatch | None = None
    ) -> Tensor:
        """Return the final hidden states; on a GPU, a tensor that will hold them."""
        self._replayed = None
        is_captured = caches is not None and caches is self._caches
        # A graph runs all layers at once: none of them can be watched.
        is_whole = watch is None and inputs.max_query_len == 1
        states = self._replay_whole(inputs) if is_captured and is_whole else None
        if is_captured and states is None and self._pieces is not None:
            states = self._pieces.forward(inputs, watch)
        return self._plain.forward(inputs, caches, watch) if states is None else states

    def _replay_whole(self, inputs: PreparedInputs) -> Tensor | None:
        if inputs.num_reqs > self._static.sizes[-1]:
            return None
        graph = self._graphs[self._static.fill(inputs)]
        # It has no room for a step with more splits than were planned for.
        if not graph.step.refill(inputs):
            return None
        graph.recording.replay()
        states = graph.recording.output[: inputs.num_reqs]
        if self._logits is not None:
            self._replayed = _Replayed(states, self._logits.first(inputs.num_reqs))
        return states

    def begin(
        self,
        inputs: PreparedInputs,
        caches: Sequence[Tensor] | None,
        watch: LayerWatch | None = None,
        *,
        may_be_interrupted: bool = False,
    ) -> Callable[[], Tensor]:
        """See ForwardPass."""
        states = self.forward(inputs, caches, watch)
        return lambda: states

    def interrupt(self) -> None:
        """See ForwardPass. Do nothing: the pass runs to its end."""

    def logits(self, states: Tensor) -> Tensor:
        """See ForwardPass. Those of a replayed step are there already, and valid until the next step."""
        if self._replayed is not None and states is self._replayed.states:
            return self._replayed.logits
        return self._plain.logits(states)

    def close(self) -> None:
        """Give the graphs' memory back."""
        if self._pieces is not None:
            self._pieces.close()
        self._graphs.clear()
        self._steps.clear()
        self._logits = None
        self._replayed = None
        self._caches = None
