"""CUDA graphs: decode steps of some batch sizes are captured once and replayed, so that a step costs one launch.

A step with other than one token a request, with more requests than the largest graph, or with a watch runs as it is.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend, StaticDecode
from engine.compute.forward_plain import PlainForward
from engine.compute.inputs import PreparedInputs
from engine.compute.staging import on_device, padded
from engine.connector import LayerWatch
from engine.models.language_model import LanguageModel
from engine.sampling.sampler import Draw

logger = logging.getLogger(__name__)

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8
_LARGEST_SIZE = 8192


class Recording(Protocol):
    """A captured run. ``output`` stays where it is; it is valid until any recording of the same recorder is replayed."""

    output: Tensor

    def replay(self) -> None:
        """Run again on what its inputs hold now."""


class Recorder(Protocol):
    """Captures runs."""

    def record(self, run: Callable[[], Tensor]) -> Recording:
        """Capture ``run``, which reads and writes tensors that stay where they are; it is run before as well."""


@dataclass
class CudaRecording:
    """See Recording."""

    graph: torch.cuda.CUDAGraph
    output: Tensor

    def replay(self) -> None:
        """See Recording."""
        self.graph.replay()


class CudaRecorder:
    """CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device)
        self._pool = cuda.graph_pool_handle()

    def record(self, run: Callable[[], Tensor]) -> CudaRecording:
        """See Recorder. The run before compiles kernels and makes plans: a capture must not."""
        cuda: Any = torch.cuda
        self._stream.wait_stream(cuda.current_stream())
        with cuda.stream(self._stream):
            run()
        cuda.current_stream().wait_stream(self._stream)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()
        return CudaRecording(graph, output)


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return 1, 2, 4 and the multiples of 8, up to the first that holds ``max_num_seqs``, at most 8192."""
    sizes = [*_SMALL_SIZES, *range(_SIZE_STEP, _LARGEST_SIZE + 1, _SIZE_STEP)]
    return [size for size, before in zip(sizes, [0, *sizes], strict=False) if before < max_num_seqs]


class _StaticTokens:
    """The token ids and positions that all graphs read, one column a request. sizes: those of the graphs."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = sorted(sizes)
        self.device = device
        self._tokens = torch.zeros(2, self.sizes[-1], dtype=torch.int32, device=device)

    def views(self, size: int) -> tuple[Tensor, Tensor]:
        """Return (token ids, positions) of the graph of this size."""
        input_ids, positions = self._tokens[:, :size]
        return input_ids, positions

    def fill(self, inputs: PreparedInputs) -> int:
        """Write the tokens of a step, padded with zeros; return the size of the graph that holds them."""
        size = next(size for size in self.sizes if size >= inputs.num_reqs)
        vectors = on_device([padded(inputs.input_ids, size), padded(inputs.positions, size)], self.device)
        for row, vector in zip(self._tokens, vectors, strict=True):
            row[:size].copy_(vector)
        return size


@dataclass(frozen=True)
class _Graph:
    step: StaticDecode
    recording: Recording


class GraphedForward:
    """Replays graphs where it can, else asks ``plain``; see ForwardPass."""

    def __init__(
        self,
        plain: PlainForward,
        model: LanguageModel,
        backend: AttentionBackend,
        recorder: Recorder,
        *,
        sizes: Sequence[int],
        max_model_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._plain = plain
        self._model = model
        self._backend = backend
        self._recorder = recorder
        self._static = _StaticTokens(sizes, device)
        self._max_blocks = -(-max_model_len // block_size)
        self._block_size = block_size
        self._graphs: dict[int, _Graph] = {}
        self._caches: Sequence[Tensor] | None = None
        self.draw: Draw = plain.draw

    def best_tokens(self, logits: Tensor) -> list[int] | None:
        """See ForwardPass."""
        return None

    def capture(self, caches: Sequence[Tensor]) -> None:
        """See ForwardPass. The largest first: the others find room in its memory."""
        start = time.monotonic()
        sizes = self._static.sizes
        for size in reversed(sizes):
            step = self._backend.plan_static(size, self._max_blocks, self._block_size, self._static.device)
            if step is None:
                logger.info("no CUDA graphs: the attention backend cannot be captured")
                return
            run = partial(self._model, *self._static.views(size), step, caches)
            with torch.inference_mode():
                self._graphs[size] = _Graph(step, self._recorder.record(run))
        self._caches = caches
        seconds = time.monotonic() - start
        logger.info("%d CUDA graphs of 1..%d requests: %.1f s", len(sizes), sizes[-1], seconds)

    def forward(
        self, inputs: PreparedInputs, caches: Sequence[Tensor] | None, watch: LayerWatch | None = None
    ) -> Tensor:
        """Return the final hidden states; on a GPU, a tensor that will hold them."""
        is_captured = caches is not None and caches is self._caches
        if (
            not is_captured
            or watch is not None
            or inputs.max_query_len > 1
            or inputs.num_reqs > self._static.sizes[-1]
        ):
            return self._plain.forward(inputs, caches, watch)
        graph = self._graphs[self._static.fill(inputs)]
        graph.step.refill(inputs)
        graph.recording.replay()
        return graph.recording.output[: inputs.num_reqs]

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
        """See ForwardPass."""
        return self._plain.logits(states)

    def close(self) -> None:
        """Give the graphs' memory back."""
        self._graphs.clear()
        self._caches = None
