"""A tensor-parallel group over torch's own collectives: NCCL between CUDA devices, gloo on the CPU.

The group is an object of its own, not the process-wide default group, so nothing else in the process is affected. The
ranks find each other through a store on 127.0.0.1 whose listening socket rank 0 inherits. Neither the store nor gloo
can prove who connects: both listen on the loopback interface only.
"""

import socket
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from contract.errors import SettingError

_HOST = "127.0.0.1"
_NO_TOKEN = -1
"""Sent for a row without a token."""
_JOIN_TIMEOUT = timedelta(seconds=120)
"""For ranks that start one after the other on a busy machine."""


class TorchRankGroup:
    """A RankGroup of several processes on one machine. The constructor returns when all have joined, within two minutes.

    Collectives raise RuntimeError when a rank is gone, or silent for ``timeout``. With NCCL the process waits on its device
    instead, and the executor that started the ranks ends it.
    """

    def __init__(self, device: torch.device, rank: int, size: int, store: Store, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._group: Any = _create(device, rank, size, store)
        self._group._set_default_timeout(timeout)

    def add_up(self, part: Tensor) -> Tensor:
        """See RankGroup."""
        part = part.contiguous()
        self._group.allreduce([part]).wait()
        return part

    def gather_columns(self, part: Tensor) -> Tensor:
        """See RankGroup."""
        if not part.shape[0]:
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._group.gather([parts] if parts else [], [part], options).wait()
        return torch.cat(parts, dim=-1) if parts else part

    def share_tokens(self, token_ids: list[int | None]) -> list[int | None]:
        """See RankGroup."""
        if not token_ids:
            return token_ids
        numbers = [_NO_TOKEN if token_id is None else token_id for token_id in token_ids]
        shared = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([shared], options).wait()
        return [None if number == _NO_TOKEN else number for number in shared.tolist()]

    def close(self) -> None:
        """See RankGroup. Waits for no other rank."""
        self._group.shutdown()


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


def _create(device: torch.device, rank: int, size: int, store: Store) -> Any:
    if device.type == "cuda":
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
