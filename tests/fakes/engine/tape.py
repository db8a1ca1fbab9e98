"""A recorder without a GPU that is as strict as a graph: it keeps the operations of a run, with their very tensors.

A replay does those operations again, with the numbers that Python had when they were captured, and writes their results
where they were. So what a run should have read anew from its inputs, and did not, shows in the results.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.compute.recording import Cut

_aten: Any = torch.ops.aten
_READING = tuple(getattr(_aten, name) for name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"))
_Operation = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]


class _Writer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes operations into the last of its pieces. Raises AssertionError for one that the host waits for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: list[list[_Operation]] = [[]]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func.overloadpacket not in _READING, f"a capture cannot read a tensor: {func}"
        result = func(*args, **(kwargs or {}))
        self.pieces[-1].append((func, args, kwargs or {}, result))
        return result


class Tape:
    """A recording in pieces; a whole run is one piece. num_replays: of all pieces together."""

    def __init__(self, pieces: list[list[_Operation]], output: Tensor) -> None:
        self.output = output
        self.num_replays = 0
        self._pieces = pieces

    @property
    def num_pieces(self) -> int:
        """The number of pieces."""
        return len(self._pieces)

    def replay(self, between: Callable[[int], None] = lambda number: None) -> None:
        """See Recording and PieceRecording."""
        for number, piece in enumerate(self._pieces):
            for operation in piece:
                _repeat(operation)
            if number + 1 < len(self._pieces):
                between(number)
        self.num_replays += 1


class TapeRecorder:
    """A Recorder that keeps its tapes in the order of capture."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def record(self, run: Callable[[], Tensor]) -> Tape:
        """See Recorder."""
        return self.record_pieces(lambda cut: run())

    def record_pieces(self, run: Callable[[Cut], Tensor]) -> Tape:
        """See Recorder."""
        run(lambda: None)
        writer = _Writer()
        with writer:
            output = run(lambda: writer.pieces.append([]))
        self.tapes.append(Tape(writer.pieces, output))
        return self.tapes[-1]


def _repeat(operation: _Operation) -> None:
    func, args, kwargs, before = operation
    results = zip(tree_leaves(func(*args, **kwargs)), tree_leaves(before), strict=True)
    for result, kept in results:
        if isinstance(kept, Tensor) and result.data_ptr() != kept.data_ptr():  # neither a view nor in place
            torch.Tensor.copy_(kept, result)
