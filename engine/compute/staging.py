"""The queue of a device: copies of a step's inputs and tokens that do not wait, and launch options of our kernels."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_cuda: Any = torch.cuda
_FIRST_WITH_OVERLAP = (9, 0)


def on_device(vectors: Sequence[NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """Copy each array to the device as int32 of the same shape; every value must fit.

    For CUDA they share one allocation of pinned memory, which torch keeps until the copy has ended.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(vector, dtype=np.int32)) for vector in vectors]
    whole = [np.ascontiguousarray(vector, dtype=np.int32) for vector in vectors]
    sizes = [vector.size for vector in whole]
    staged = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
    np.concatenate([vector.ravel() for vector in whole], out=staged.numpy())
    pieces = torch.split(staged.to(device, non_blocking=True), sizes)
    return [piece.view(vector.shape) for piece, vector in zip(pieces, whole, strict=True)]


def copy_into(targets: Sequence[Tensor], vectors: Sequence[NDArray[np.integer]]) -> None:
    """Copy each array into the first elements of its contiguous int32 tensor, without waiting for the device.

    For CUDA they are staged in one allocation of pinned memory, which torch keeps until the copies have ended.
    """
    pieces = [torch.from_numpy(np.ascontiguousarray(vector, dtype=np.int32).ravel()) for vector in vectors]
    if any(target.device.type == "cuda" for target in targets):
        staged = torch.empty(sum(map(len, pieces)), dtype=torch.int32, pin_memory=True)
        torch.cat(pieces, out=staged)
        pieces = list(torch.split(staged, [len(piece) for piece in pieces]))
    for target, piece in zip(targets, pieces, strict=True):
        target.view(-1)[: len(piece)].copy_(piece, non_blocking=True)


def padded(rows: NDArray[np.integer[Any]], num_rows: int, fill: int = 0) -> NDArray[np.int32]:
    """Return the array with rows of ``fill`` behind its own; ten times as fast as ``np.pad`` for a step's small arrays."""
    wide = np.full((num_rows, *rows.shape[1:]), fill, dtype=np.int32)
    wide[: len(rows)] = rows
    return wide


def begin_copy(tensor: Tensor) -> Callable[[], Any]:
    """Begin to copy a tensor to the host. The returned function waits for what was launched before, and returns a list.

    It does not wait for what is launched later, which may overwrite the tensor.
    """
    if tensor.device.type == "cpu":
        values = tensor.tolist()
        return lambda: values
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copied.copy_(tensor, non_blocking=True)
    is_copied = _cuda.Event()
    is_copied.record(_cuda.current_stream(tensor.device))

    def wait() -> Any:
        is_copied.synchronize()
        return copied.tolist()

    return wait


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array into a tensor of the same dtype."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@cache
def overlap_of(device: torch.device) -> dict[str, Any]:
    """Return the options with which a kernel may begin before the one ahead of it ends (programmatic dependent launch).

    overlaps is a constant of each kernel that takes them: if it is set, the kernel lets the next one begin at once, and
    waits (``gdc_wait``) before it reads what a kernel wrote, and before it writes anything. Until then it may read weights,
    and what the host copied. At least one program always waits, since a wait ends with the kernel directly ahead only.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FIRST_WITH_OVERLAP:
        return {"overlaps": False}
    from triton.language.extra import cuda

    if not hasattr(cuda, "gdc_wait"):
        return {"overlaps": False}
    return {"overlaps": True, "launch_pdl": True}
