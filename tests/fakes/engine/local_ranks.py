"""Ranks as threads of one process, without sockets: a fake of several rank processes, for tests and trials.

The runners, the cut model and the order of collectives are the real ones; a barrier takes the place of the collectives.
"""

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import Pipe
from typing import Any

import torch
from torch import Tensor

from contract.layout import KVLayout
from engine.compute.forward import MakeForward
from engine.connector import RanksConnector
from engine.distributed.group import RankGroup, columns_of_all
from engine.distributed.messages import RankRunner
from engine.executor import Executor
from engine.kv_cache.startup import KVCacheConfig
from engine.kv_tiers.orders import TierOrder
from engine.kv_tiers.storage import TierStorage
from engine.kv_tiers.tier_group import TierGroup
from engine.models.config import ModelInfo
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.settings import EngineSettings

_TIMEOUT_SECONDS = 60.0


class Exchange:
    """A place where the threads of one group exchange values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=_TIMEOUT_SECONDS)
        self._values: list[Any] = [None] * size

    def exchange(self, rank: int, own: Any) -> list[Any]:
        """Return every rank's value, in rank order. Raises BrokenBarrierError when a rank does not come."""
        self._values[rank] = own
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()  # no thread writes its next value before all have read these
        return values

    def abort(self) -> None:
        """Fail every thread that waits here, or will."""
        self._barrier.abort()


class LocalRankGroup:
    """A RankGroup as one thread sees it."""

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank = rank
        self.size = exchange.size
        self._exchange = exchange

    def add_up(self, part: Tensor) -> Tensor:
        """See RankGroup."""
        first, *others = self._exchange.exchange(self.rank, part)
        total: Tensor = first.clone()
        for other in others:
            total += other
        return total

    def highest(self, values: Tensor) -> Tensor:
        """See RankGroup."""
        return torch.stack(self._exchange.exchange(self.rank, values)).amax(dim=0)

    def gather_columns(self, part: Tensor, num_columns: int) -> Tensor:
        """See RankGroup."""
        parts = self._exchange.exchange(self.rank, part)
        return columns_of_all(parts, num_columns) if self.rank == 0 else part

    def share(self, values: Tensor) -> Tensor:
        """See RankGroup."""
        return values.copy_(self._exchange.exchange(self.rank, values)[0])

    def check_dtype(self, dtype: torch.dtype) -> None:
        """See RankGroup."""

    def close(self) -> None:
        """See RankGroup."""
        self._exchange.abort()


def groups_of_threads(size: int) -> list[LocalRankGroup]:
    """Make the groups of ``size`` threads that exchange with each other, in rank order."""
    exchange = Exchange(size)
    return [LocalRankGroup(rank, exchange) for rank in range(size)]


class LocalRanksExecutor(Executor):
    """An Executor whose ranks are threads; their models are loaded when the constructor returns.

    groups: what each rank joins, in rank order; None: an Exchange. make_forward: see ``ModelRunner.load_model``.
    """

    runs_ahead = False

    def __init__(
        self,
        settings: EngineSettings,
        groups: Sequence[RankGroup] | None = None,
        make_forward: MakeForward | None = None,
    ) -> None:
        size = settings.tensor_parallel_size
        self._groups = groups or groups_of_threads(size)
        reports, theirs = zip(*(Pipe(duplex=False) for _ in self._groups), strict=True)
        self.runners = [RankRunner(settings, *each) for each in zip(self._groups, theirs, strict=True)]
        self._tiers = TierGroup(reports, self._order_kv_tiers)
        self._threads = ThreadPoolExecutor(size, "rank")
        self._connector: RanksConnector | None = None
        with ExitStack() as undo:
            undo.callback(self.shutdown)
            self._on_all([partial(runner.load_model, make_forward=make_forward) for runner in self.runners])
            self.runs_ahead = all(self.collective_rpc("get_runs_ahead"))
            undo.pop_all()

    @property
    def model_info(self) -> ModelInfo:
        """See Executor."""
        return self.runners[0].model_info

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """See Executor."""
        return self.runners[0].regions.config

    @property
    def layout(self) -> KVLayout:
        """See Executor."""
        return self.runners[0].memory.layout

    def collective_rpc(self, method: str, *args: Any, **named: Any) -> list[Any]:
        """See Executor. A rank's error is raised as it is; it breaks the group if others wait for that rank."""
        return self._on_all([partial(getattr(runner, method), *args, **named) for runner in self.runners])

    def set_connector(self, connector: RanksConnector) -> None:
        """See Executor."""
        self._connector = connector
        ends = [socket.socketpair() for _ in self.runners]
        plans = connector.connect([ours for ours, _ in ends], [theirs.detach() for _, theirs in ends])
        self.collective_rpc("open_connector", plans)
        connector.begin()

    def open_kv_tiers(self, settings: EngineSettings) -> list[TierStorage]:
        """See Executor."""
        return [*self._tiers.open(self.collective_rpc("open_kv_tiers"))]

    def begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """See Executor. On the host, the step runs when its results are waited for."""
        scheduled.kv_tier_orders = self._tiers.pop_orders()
        if not self.runs_ahead:
            return partial(self._finish, "execute_model", scheduled)
        self.collective_rpc("begin_step", scheduled, None)
        return partial(self._finish, "finish_step", None)

    def _order_kv_tiers(self, orders: list[TierOrder]) -> bool:
        self.collective_rpc("order_kv_tiers", orders)
        return True

    def _on_all(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        futures = [self._threads.submit(call) for call in calls]
        return [future.result() for future in futures]

    def _finish(self, method: str, argument: SchedulerOutput | None) -> ModelRunnerOutput:
        output: ModelRunnerOutput = self.collective_rpc(method, argument)[0]
        if self._connector is not None:
            sent, received = self._connector.get_finished()
            output.finished_sending = sent or None
            output.finished_recving = received or None
        return output

    def shutdown(self) -> None:
        """See Executor."""
        for group in self._groups:
            group.close()
        self._threads.shutdown()
        for runner in self.runners:
            runner.shutdown()
        self._tiers.close()
        if self._connector is not None:
            self._connector.close()
