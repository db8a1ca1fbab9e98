"""Captures of runs on a device: whole, or cut into pieces with something between them that is not captured."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Cut = Callable[[], None]
"""Called by a run that is captured in pieces, where one piece ends and the next one begins."""


class Recording(Protocol):
    """A captured run. ``output`` stays where it is; it is valid until any recording of the same recorder is replayed."""

    output: Tensor

    def replay(self) -> None:
        """Run again on what its inputs hold now."""


class PieceRecording(Protocol):
    """A run that was captured in pieces; ``output`` as in Recording."""

    output: Tensor

    def replay(self, between: Callable[[int], None]) -> None:
        """Run the pieces again, in order. ``between`` is called behind each but the last one, with its number from 0."""


class Recorder(Protocol):
    """Captures runs."""

    def record(self, run: Callable[[], Tensor]) -> Recording:
        """Capture ``run``, which reads and writes tensors that stay where they are; it is run before as well."""

    def record_pieces(self, run: Callable[[Cut], Tensor]) -> PieceRecording:
        """Capture the parts of ``run`` between its calls of the argument; see ``record``.

        A tensor of one piece may be read in later ones. What is done between the pieces must write tensors that ``run`` has
        from elsewhere.
        """


@dataclass
class CudaRecording:
    """See Recording."""

    graph: torch.cuda.CUDAGraph
    output: Tensor

    def replay(self) -> None:
        """See Recording."""
        self.graph.replay()


@dataclass
class CudaPieces:
    """See PieceRecording."""

    graphs: Sequence[torch.cuda.CUDAGraph]
    output: Tensor

    def replay(self, between: Callable[[int], None]) -> None:
        """See PieceRecording."""
        *others, last = self.graphs
        for number, graph in enumerate(others):
            graph.replay()
            between(number)
        last.replay()


class CudaRecorder:
    """CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device)
        self._pool = cuda.graph_pool_handle()

    def record(self, run: Callable[[], Tensor]) -> CudaRecording:
        """See Recorder. The run before compiles kernels and makes plans: a capture must not."""
        cuda: Any = torch.cuda
        self._run_before(run)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()
        return CudaRecording(graph, output)

    def record_pieces(self, run: Callable[[Cut], Tensor]) -> CudaPieces:
        """See Recorder. Each piece is a graph; a tensor that later pieces read stays in the pool until they are captured."""
        cuda: Any = torch.cuda
        self._run_before(lambda: run(lambda: None))
        graphs: list[Any] = []

        def begin() -> None:
            graphs.append(cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        # As torch.cuda.graph does, but once for all pieces: a device that is idle, and no memory that a capture would miss.
        cuda.synchronize()
        gc.collect()
        cuda.empty_cache()
        with cuda.stream(self._stream):
            begin()
            try:
                output = run(cut)
            finally:
                graphs[-1].capture_end()
        return CudaPieces(graphs, output)

    def _run_before(self, run: Callable[[], Tensor]) -> None:
        cuda: Any = torch.cuda
        self._stream.wait_stream(cuda.current_stream())
        with cuda.stream(self._stream):
            run()
        cuda.current_stream().wait_stream(self._stream)
