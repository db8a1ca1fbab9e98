"""An engine's connector: its half beside the scheduler, and what connects it with the executor's ranks."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from contract.layout import Side
from contract.requests import EngineRequest, ReceiveTransfer
from engine.connector import ConnectorFactory, SchedulerConnector, ShowsProgress
from engine.expecting import ExpectsRequests

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
        receiver: object = None if scheduler is None else scheduler.receiver
        self._expecting = receiver if isinstance(receiver, ExpectsRequests) else None

    def next_arrival(self) -> float | None:
        """Return when, on the clock, the KV of a request is expected; None if no sender has announced any."""
        return self.scheduler.receiver.next_arrival() if self.scheduler is not None else None

    def has_arrived(self) -> bool:
        """Return whether KV has arrived that ``take_finished`` has not returned. From any thread."""
        return self.scheduler is not None and self.scheduler.receiver.has_arrived()

    def expect(self, request: EngineRequest) -> None:
        """Ask for the KV of a request that will be added, if it needs any. From any thread."""
        if self._expecting is not None and isinstance(request.transfer, ReceiveTransfer):
            self._expecting.expect(request)

    def connect(self, request: EngineRequest, then: Callable[[], None]) -> None:
        """Connect to the worker that a request's KV will come from, if any; from any thread. ``then``: it is over."""
        if self._expecting is not None and isinstance(request.transfer, ReceiveTransfer):
            self._expecting.connect(request.transfer, then)
        else:
            then()

    def drop_expected(self, request: EngineRequest) -> None:
        """Stop fetching what was expected for a request, unless it was added."""
        if self._expecting is not None and isinstance(request.transfer, ReceiveTransfer):
            self._expecting.drop_expected(request.key)

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

    Raises SettingError if the connector does not serve ``num_ranks`` ranks.
    """
    if factory is None:
        return EngineConnector()
    with ExitStack() as undo:
        model = executor.model_info
        pair = factory(Side(executor.layout, num_ranks, model.num_kv_heads), model.fingerprint, wake)
        connector = EngineConnector(pair.scheduler, pair.ranks.take_finished, pair.address)
        undo.callback(connector.close)
        executor.set_connector(pair.ranks)
        undo.pop_all()
    return connector
