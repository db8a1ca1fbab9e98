"""An engine's connector: its half beside the scheduler, and what connects it with the executor's ranks."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from contract.errors import SettingError
from contract.layout import Side
from engine.connector import (
    ConnectorFactory,
    JoinsRanks,
    RanksConnectorFactory,
    SchedulerConnector,
    ShowsProgress,
)

if TYPE_CHECKING:
    from engine.executors.executor import Executor

TakeFinished = Callable[[], tuple[set[str], set[str]]]
"""Returns the keys of transfers that the ranks have finished since the last call: (sent, received)."""


class EngineConnector:
    """A connector of which both halves are open; or none, in an engine that sends and receives no KV.

    scheduler: the half beside the scheduler. address: "host:port" of the control link, empty without a connector.
    """

    def __init__(
        self,
        scheduler: SchedulerConnector | None = None,
        take_finished: TakeFinished = lambda: (set(), set()),
        address: str = "",
    ) -> None:
        self.scheduler = scheduler
        self.take_finished = take_finished
        self.address = address

    def next_arrival(self) -> float | None:
        """Return when, on the clock, the KV of a request is expected; None if no sender has announced any."""
        return self.scheduler.next_arrival() if self.scheduler is not None else None

    def has_arrived(self) -> bool:
        """Return whether KV has arrived that ``take_finished`` has not returned. From any thread."""
        return self.scheduler is not None and self.scheduler.has_arrived()

    def progress(self) -> dict[str, int]:
        """Return how far the connector's threads have come; from any thread, without waiting for one."""
        return self.scheduler.progress() if isinstance(self.scheduler, ShowsProgress) else {}

    def close(self) -> None:
        """Close the half beside the scheduler; the ranks close theirs."""
        if self.scheduler is not None:
            self.scheduler.close()


def connect(
    executor: "Executor", factory: ConnectorFactory | None, num_ranks: int, wake: Callable[[], None]
) -> EngineConnector:
    """Open both halves of a connector for an executor with an allocated KV cache. factory: None opens none.

    Raises SettingError for a connector that does not serve ``num_ranks`` ranks.
    """
    if factory is None:
        return EngineConnector()
    layout = executor.layout
    fingerprint = executor.model_info.fingerprint
    with ExitStack() as undo:
        if not isinstance(executor, JoinsRanks):
            pair = factory(layout, fingerprint, wake)
            connector = EngineConnector(pair.scheduler, pair.rank.take_finished, pair.address)
            undo.callback(connector.close)
            executor.set_connector(pair.rank)
        else:
            ranks_factory: object = factory
            if not isinstance(ranks_factory, RanksConnectorFactory):
                raise SettingError(
                    f"tensor_parallel_size is {num_ranks}, and this connector serves engines of one rank only",
                    param="tensor_parallel_size",
                )
            joined = ranks_factory.for_ranks(Side(layout, num_ranks), fingerprint, wake)
            connector = EngineConnector(joined.scheduler, joined.ranks.take_finished, joined.address)
            undo.callback(connector.close)
            executor.join_ranks(joined.ranks)
        undo.pop_all()
    return connector
