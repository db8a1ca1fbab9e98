"""The tokens of data-parallel ranks are exchanged by torch's own collectives: NCCL between CUDA devices, gloo on the CPU.

The ranks may be on several machines. They find each other through a store that rank 0 opens; neither the store nor gloo can
prove who connects, so their network must be private (``docs/security.md``).
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from contract.addresses import split_address
from contract.errors import WorkerLostError
from engine.distributed.process_group import JOIN_TIMEOUT, create_collectives, wait_for
from engine.settings import EngineSettings

_OPEN_STORES: list[TCPStore] = []


def open_group_store(host: str) -> int:
    """Open the store of a group, for as long as this process runs; return its port."""
    store = TCPStore(host, 0, None, True, timeout=JOIN_TIMEOUT, wait_for_workers=False)
    _OPEN_STORES.append(store)
    return store.port


class TorchTokenExchange:
    """A TokenExchange between one process of each rank. The constructor returns when all have joined.

    store: "host:port" of the group's store. host: where the others reach this process. name: equal for the processes that
    exchange tokens, which are those with the same place in their ranks. timeout: of a collective.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        size: int,
        *,
        store: str,
        host: str,
        name: str,
        timeout: timedelta,
    ) -> None:
        self.rank = rank
        self.size = size
        self._counts: list[int] = []
        address, port = split_address(store)
        client = TCPStore(address, port, None, False, timeout=JOIN_TIMEOUT, wait_for_workers=False)
        group: Any = create_collectives(device, rank, size, PrefixStore(name, client), host)
        group._set_default_timeout(timeout)  # noqa: SLF001 torch offers nothing else
        self._group = group

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """See TokenExchange. Each part is one collective, of as many rows as the rank with the most has."""
        count = torch.tensor([len(parts[0])], device=parts[0].device)
        self._counts = [int(number) for number in torch.cat(self._all(count)).tolist()]
        most = max(self._counts)
        gathered = []
        for part in parts:
            padded = part.new_zeros((most, *part.shape[1:]))
            padded[: len(part)] = part
            of_ranks = zip(self._all(padded), self._counts, strict=True)
            gathered.append(torch.cat([rows[:number] for rows, number in of_ranks]))
        return gathered

    def add_up_own(self, states: Tensor) -> Tensor:
        """See TokenExchange."""
        most = max(self._counts)
        padded = states.new_zeros((self.size, most, *states.shape[1:]))
        first = 0
        for index, number in enumerate(self._counts):
            padded[index, :number] = states[first : first + number]
            first += number
        own = torch.empty_like(padded[0])
        options = dist.ReduceScatterOptions()
        _complete(lambda: self._group.reduce_scatter([own], [list(padded.unbind())], options))
        return own[: self._counts[self.rank]]

    def close(self) -> None:
        """See TokenExchange. Waits for no other rank."""
        self._group.shutdown()

    def _all(self, rows: Tensor) -> list[Tensor]:
        """Return the rows of every rank, which have one shape."""
        found = [torch.empty_like(rows) for _ in range(self.size)]
        _complete(lambda: self._group.allgather([found], [rows.contiguous()]))
        return found


def join_exchange(settings: EngineSettings, device: torch.device, place: int) -> TorchTokenExchange | None:
    """Join the exchange of tokens of the engine's data-parallel group; None if it has none.

    place: the index of this process among those of its rank. Each has its own part of every expert's width, and exchanges
    tokens with the processes of the same place in other ranks.
    """
    if settings.data_parallel_size == 1:
        return None
    return TorchTokenExchange(
        device,
        settings.data_parallel_rank,
        settings.data_parallel_size,
        store=settings.data_parallel_store,
        host=settings.data_parallel_host,
        name=f"experts {place}",
        timeout=timedelta(seconds=settings.rank_timeout_seconds),
    )


def _complete(start: Callable[[], Any]) -> None:
    """Make a collective. Raises WorkerLostError if another rank does not take part: this rank's requests run elsewhere."""
    try:
        wait_for(start())
    except RuntimeError as error:
        raise WorkerLostError(f"another rank of the data-parallel group is gone: {error}") from error
