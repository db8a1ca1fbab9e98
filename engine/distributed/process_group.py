"""A tensor-parallel group over torch's own collectives: NCCL between CUDA devices, gloo on the CPU.

The group is an object of its own, not the process-wide default group, so nothing else in the process is affected. The
ranks find each other through a store on 127.0.0.1 whose listening socket rank 0 inherits. Neither the store nor gloo
can prove who connects: both listen on the loopback interface only.

``SymmetricSums`` replaces NCCL for short sums: a kernel over memory that all ranks can read (torch's symmetric memory)
instead of a collective. Each rank has a buffer that is mapped into all others. A short sum is one-shot: each rank copies its
part into its buffer and adds up all buffers. A longer one is two-shot: each rank adds up its share, and takes the other
shares from the others. All ranks add in the same order.
"""

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store, TCPStore

from contract.errors import SettingError
from engine.distributed.group import columns_of_all

NUM_BYTES = 8 * 2**20
"""The size of each buffer: longer sums are left to NCCL."""
ONE_SHOT_BYTES = 256 * 2**10
"""Up to here every rank reads everything; above, each reads twice its share, and waits once more."""
_ALIGNMENT = 16
_DTYPES = (torch.float32, torch.bfloat16)
_NAME = "kvbaton"
_c10d: Any = _distributed_c10d
_HOST = "127.0.0.1"
JOIN_TIMEOUT = timedelta(seconds=120)
"""For ranks that start one after the other on a busy machine."""
CreateCollectives = Callable[[torch.device, int, int, Store], Any]
"""Device, rank, size and store → torch's object with the collectives of the group."""


class SymmetricSums:
    """The sums of one rank. The constructor returns when all ranks have mapped the buffers.

    library: torch's memory and kernels, from ``find_library``. Raises SettingError if the devices cannot read each other's
    memory.
    """

    def __init__(
        self, library: tuple[Any, Any], device: torch.device, rank: int, size: int, store: Store
    ) -> None:
        memory, self._kernels = library
        try:
            memory.set_group_info(_NAME, rank, size, PrefixStore(_NAME, store))
            self._buffer: Tensor = memory.empty_strided_p2p((NUM_BYTES,), (1,), torch.uint8, device)
            memory.rendezvous(self._buffer, _NAME)
        except RuntimeError as error:
            raise _refusal(f"{device} cannot share memory with the other ranks: {error}") from error

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise SettingError for a dtype whose sums are never made here."""
        if dtype not in _DTYPES:
            raise _refusal(f"it adds float32 and bfloat16, and the model computes {dtype}")

    def accepts(self, part: Tensor) -> bool:
        """Return whether a sum of such parts is made here; not of numbers in another dtype than the model's."""
        return part.dtype in _DTYPES and part.nbytes <= NUM_BYTES and part.nbytes % _ALIGNMENT == 0

    def add_up(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts; ``part``, which is contiguous, may be overwritten."""
        own = self._buffer[: part.nbytes].view(part.dtype).view(part.shape)
        if part.nbytes <= ONE_SHOT_BYTES:
            total: Tensor = self._kernels.one_shot_all_reduce_copy(own, part, "sum", _NAME)
            return total
        # The kernels wait for each other before they read and before they return, so the next sum may use the buffers again.
        own.copy_(part)
        self._kernels.two_shot_all_reduce_out(own, "sum", _NAME, part)
        return part


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
        self._groups.append(group)  # torch does not keep it
        _c10d._SymmetricMemory.set_group_info(name, rank, size, store)


def _refusal(reason: str) -> SettingError:
    return SettingError(f"all_reduce is symmetric, but {reason}; choose nccl", param="all_reduce")


class TorchRankGroup:
    """A RankGroup of several processes on one machine. The constructor returns when all have joined, within two minutes.

    Collectives raise RuntimeError when a rank is gone, or silent for ``timeout``. With NCCL the process waits on its device
    instead, and the executor that started the ranks ends it.

    create: makes the group's collectives; None: NCCL's or gloo's, by the device. sums: add up what they take; None: nothing.
    All ranks set them at the same point.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        size: int,
        store: Store,
        timeout: timedelta,
        create: CreateCollectives | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.sums: SymmetricSums | None = None
        self._group: Any = (create or create_collectives)(device, rank, size, store)
        # NCCL forms its communicator with the first collective, which must not be captured: so one is made here.
        if device.type != "cpu":
            self._add_up_by_group(torch.zeros(1, device=device))
        self._group._set_default_timeout(timeout)

    @property
    def backend(self) -> Any:
        """Torch's object with the collectives of the group."""
        return self._group

    def add_up(self, part: Tensor) -> Tensor:
        """See RankGroup."""
        part = part.contiguous()
        if self.sums is not None and self.sums.accepts(part):
            return self.sums.add_up(part)
        return self._add_up_by_group(part)

    def highest(self, values: Tensor) -> Tensor:
        """See RankGroup."""
        options = _on_this_stream(dist.AllreduceOptions())
        options.reduceOp = dist.ReduceOp.MAX
        wait_for(self._group.allreduce([values], options))
        return values

    def gather_columns(self, part: Tensor, num_columns: int) -> Tensor:
        """See RankGroup."""
        if not part.shape[0]:  # no rank has rows: all skip the collective alike
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        options = _on_this_stream(dist.GatherOptions())
        options.rootRank = 0
        wait_for(self._group.gather([parts] if parts else [], [part], options))
        return columns_of_all(parts, num_columns) if parts else part

    def share(self, values: Tensor) -> Tensor:
        """See RankGroup."""
        options = _on_this_stream(dist.BroadcastOptions())
        options.rootRank = 0
        wait_for(self._group.broadcast([values], options))
        return values

    def check_dtype(self, dtype: torch.dtype) -> None:
        """See RankGroup."""
        if self.sums is not None:
            self.sums.check_dtype(dtype)

    def close(self) -> None:
        """See RankGroup. Waits for no other rank."""
        self._group.shutdown()

    def _add_up_by_group(self, part: Tensor) -> Tensor:
        """Add parts up by the process group: NCCL, or gloo on the host."""
        wait_for(self._group.allreduce([part], _on_this_stream(dist.AllreduceOptions())))
        return part


def _on_this_stream(options: Any) -> Any:
    # There a graph can capture a collective; on NCCL's own stream, each one would wait for the device twice.
    options.asyncOp = False
    return options


def wait_for(work: Any) -> None:
    """Wait until a collective has ended, or on a device until its order is certain."""
    # Since torch 2.8 NCCL returns None for one on the current stream, whose order is enough.
    if work is not None:
        work.wait()


def open_store(listening: socket.socket | None, port: int, size: int) -> Store:
    """Open rank 0's end of the store, on its ``listening`` socket, or another rank's (None)."""
    if listening is None:
        return TCPStore(_HOST, port, size, False, timeout=JOIN_TIMEOUT, wait_for_workers=False)
    return TCPStore(
        _HOST,
        port,
        size,
        True,
        timeout=JOIN_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def listen_for_ranks() -> socket.socket:
    """Return a listening socket on a free port of 127.0.0.1, for rank 0's end of the store."""
    return socket.create_server((_HOST, 0))


def create_collectives(device: torch.device, rank: int, size: int, store: Store, host: str = _HOST) -> Any:
    """Join the group. host: where gloo listens for other ranks.

    Raises SettingError for a CUDA device if this build of torch has no NCCL.
    """
    if device.type != "cpu":
        if not dist.is_nccl_available():
            raise SettingError(
                "this build of torch has no NCCL; use device cpu or another build", param="device"
            )
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = JOIN_TIMEOUT
        return nccl(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = JOIN_TIMEOUT
    options._threads = 1
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, size, options)
