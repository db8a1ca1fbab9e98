"""A tensor-parallel group over torch's own collectives: NCCL between CUDA devices, gloo on the CPU.

The group is an object of its own, not the process-wide default group, so nothing else in the process is affected. The
ranks find each other through a store on 127.0.0.1 whose listening socket rank 0 inherits. Neither the store nor gloo
can prove who connects: both listen on the loopback interface only.
"""

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from contract.errors import SettingError
from engine.distributed.group import columns_of_all
from engine.distributed.symmetric import SymmetricSums

_HOST = "127.0.0.1"
_JOIN_TIMEOUT = timedelta(seconds=120)
"""For ranks that start one after the other on a busy machine."""
CreateCollectives = Callable[[torch.device, int, int, Store], Any]
"""Device, rank, size and store → torch's object with the collectives of the group."""


class TorchRankGroup:
    """A RankGroup of several processes on one machine. The constructor returns when all have joined, within two minutes.

    Collectives raise RuntimeError when a rank is gone, or silent for ``timeout``. With NCCL the process waits on its device
    instead, and the executor that started the ranks ends it.

    NCCL's collectives run on the current stream (``asyncOp`` is off), where a graph can capture them: on NCCL's own stream,
    each one would wait for the device twice. NCCL forms its communicator with the first one, which must not be captured, so
    the constructor makes one.

    create: makes the group's collectives; None: NCCL's or gloo's, by the device.
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
        self._sums: SymmetricSums | None = None
        self._group: Any = (create or create_collectives)(device, rank, size, store)
        if device.type != "cpu":
            self._add_up_by_group(torch.zeros(1, device=device))
        self._group._set_default_timeout(timeout)

    @property
    def backend(self) -> Any:
        """Torch's object with the collectives of the group."""
        return self._group

    def add_up_by(self, sums: SymmetricSums) -> None:
        """Add up by ``sums`` from now on what they take; all ranks call this."""
        self._sums = sums

    def add_up(self, part: Tensor) -> Tensor:
        """See RankGroup."""
        part = part.contiguous()
        if self._sums is not None and self._sums.takes(part):
            return self._sums.add_up(part)
        return self._add_up_by_group(part)

    def highest(self, values: Tensor) -> Tensor:
        """See RankGroup."""
        options = _on_this_stream(dist.AllreduceOptions())
        options.reduceOp = dist.ReduceOp.MAX
        _wait(self._group.allreduce([values], options))
        return values

    def gather_columns(self, part: Tensor, num_columns: int) -> Tensor:
        """See RankGroup."""
        if not part.shape[0]:
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        options = _on_this_stream(dist.GatherOptions())
        options.rootRank = 0
        _wait(self._group.gather([parts] if parts else [], [part], options))
        return columns_of_all(parts, num_columns) if parts else part

    def share(self, values: Tensor) -> Tensor:
        """See RankGroup."""
        options = _on_this_stream(dist.BroadcastOptions())
        options.rootRank = 0
        _wait(self._group.broadcast([values], options))
        return values

    def check_dtype(self, dtype: torch.dtype) -> None:
        """See RankGroup."""
        if self._sums is not None:
            self._sums.check_dtype(dtype)

    def close(self) -> None:
        """See RankGroup. Waits for no other rank."""
        self._group.shutdown()

    def _add_up_by_group(self, part: Tensor) -> Tensor:
        """Add parts up by the process group: NCCL, or gloo on the host."""
        _wait(self._group.allreduce([part], _on_this_stream(dist.AllreduceOptions())))
        return part


def _on_this_stream(options: Any) -> Any:
    options.asyncOp = False
    return options


def _wait(work: Any) -> None:
    """Wait for a collective. Since torch 2.8 NCCL returns None for one on the current stream, whose order is enough."""
    if work is not None:
        work.wait()


def open_store(listening: socket.socket | None, port: int, size: int) -> Store:
    """Open rank 0's end of the store, on its ``listening`` socket, or another rank's (None)."""
    if listening is None:
        return TCPStore(_HOST, port, size, False, timeout=_JOIN_TIMEOUT, wait_for_workers=False)
    return TCPStore(
        _HOST,
        port,
        size,
        True,
        timeout=_JOIN_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def listen_for_ranks() -> socket.socket:
    """Return a listening socket on a free port of 127.0.0.1, for rank 0's end of the store."""
    return socket.create_server((_HOST, 0))


def create_collectives(device: torch.device, rank: int, size: int, store: Store) -> Any:
    """Join the group. Raises SettingError for a CUDA device if this build of torch has no NCCL."""
    if device.type != "cpu":
        if not dist.is_nccl_available():
            raise SettingError(
                "this build of torch has no NCCL; use device cpu or another build", param="device"
            )
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = _JOIN_TIMEOUT
        return nccl(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _JOIN_TIMEOUT
    options._threads = 1
    options._devices = [gloo.create_device(hostname=_HOST)]
    return gloo(store, rank, size, options)
