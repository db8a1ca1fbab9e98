"""Sums of ranks over memory that all of them can read, by torch's symmetric memory: a kernel instead of a collective.

Each rank has a buffer that is mapped into all others. A short sum is one-shot: each rank copies its part into its buffer
and adds up all buffers. A longer one is two-shot: each rank adds up its share, and takes the other shares from the others.
The kernels wait for each other before they read and before they return, so the next sum may use the buffers again. They
run on the current stream, and leave nothing behind that a graph could not replay. All ranks add in the same order.
"""

from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store

from contract.errors import SettingError

NUM_BYTES = 8 * 2**20
"""The size of each buffer: longer sums are left to NCCL."""
ONE_SHOT_BYTES = 256 * 2**10
"""Up to here every rank reads everything; above, each reads twice its share, and waits once more."""
_ALIGNMENT = 16
_DTYPES = (torch.float32, torch.bfloat16)
_NAME = "kvbaton"
_c10d: Any = _distributed_c10d


class SymmetricSums:
    """The sums of one rank. The constructor returns when all ranks have mapped the buffers.

    library: torch's memory and kernels, from ``find_library``. Raises SettingError if the devices cannot read each other's
    memory.
    """

    def __init__(
        self, library: tuple[Any, Any], device: torch.device, rank: int, size: int, store: Store
    ) -> None:
        self._memory, self._kernels = library
        self._buffer = self._map_buffers(device, rank, size, store)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise SettingError for a dtype whose sums are never made here."""
        if dtype not in _DTYPES:
            raise _refusal(f"it adds float32 and bfloat16, and the model computes {dtype}")

    def takes(self, part: Tensor) -> bool:
        """Return whether a sum of such parts is made here; not of numbers in another dtype than the model's."""
        return part.dtype in _DTYPES and part.nbytes <= NUM_BYTES and part.nbytes % _ALIGNMENT == 0

    def add_up(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts; ``part``, which is contiguous, may be overwritten."""
        own = self._buffer[: part.nbytes].view(part.dtype).view(part.shape)
        if part.nbytes <= ONE_SHOT_BYTES:
            total: Tensor = self._kernels.one_shot_all_reduce_copy(own, part, "sum", _NAME)
            return total
        own.copy_(part)
        self._kernels.two_shot_all_reduce_out(own, "sum", _NAME, part)
        return part

    def _map_buffers(self, device: torch.device, rank: int, size: int, store: Store) -> Tensor:
        try:
            self._memory.set_group_info(_NAME, rank, size, PrefixStore(_NAME, store))
            buffer: Tensor = self._memory.empty_strided_p2p((NUM_BYTES,), (1,), torch.uint8, device)
            self._memory.rendezvous(buffer, _NAME)
        except RuntimeError as error:
            raise _refusal(f"{device} cannot share memory with the other ranks: {error}") from error
        return buffer


def check_device(device: torch.device) -> None:
    """Raise SettingError if this device or this build of torch has no symmetric memory."""
    if device.type != "cuda":
        raise _refusal(f"it needs CUDA devices, and this is {device.type}")
    for name in ("one_shot_all_reduce_copy", "two_shot_all_reduce_out"):
        if not hasattr(torch.ops.symm_mem, name):
            raise _refusal(f"torch {torch.__version__} has no {name}")


def find_library(device: torch.device, backend: Any) -> tuple[Any, Any]:
    """Return torch's symmetric memory and its kernels. Raises SettingError if this build or device has none.

    backend: the collectives of these ranks.
    """
    check_device(device)
    return NamedMemory(device, backend), torch.ops.symm_mem


class NamedMemory:
    """torch's symmetric memory for ranks outside torch's process-wide default group.

    Memory and kernels look up their ranks by the name of a process group, so one is registered, and kept: torch does not.
    """

    def __init__(self, device: torch.device, backend: Any) -> None:
        self.empty_strided_p2p = _c10d._SymmetricMemory.empty_strided_p2p
        self.rendezvous = _c10d._SymmetricMemory.rendezvous
        self._device = device
        self._backend = backend
        self._groups: list[Any] = []

    def set_group_info(self, name: str, rank: int, size: int, store: Store) -> None:
        """Register the ranks under this name, once in a process."""
        kinds: Any = ProcessGroup.BackendType
        kind = kinds.NCCL if self._device.type == "cuda" else kinds.GLOO
        group: Any = ProcessGroup(store, rank, size)
        group._set_default_backend(kind)
        group._register_backend(self._device, kind, self._backend)
        group._set_group_name(name)
        _c10d._register_process_group(name, group)
        self._groups.append(group)
        _c10d._SymmetricMemory.set_group_info(name, rank, size, store)


def _refusal(reason: str) -> SettingError:
    return SettingError(f"all_reduce is symmetric, but {reason}; choose nccl", param="all_reduce")
