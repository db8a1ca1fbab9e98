"""An engine's connector: its half beside the scheduler, and what connects it with the executor's ranks."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contract.layout import Side
from contract.requests import EngineRequest, ReceiveTransfer
from engine.connector import ConnectorPair
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.remote_kv import RemoteKV, TransferStages

if TYPE_CHECKING:
    from engine.executor import Executor
GetFinished = Callable[[], tuple[set[str], set[str]]]
"""Returns the keys of transfers that the ranks have finished since the last call: (sent, received)."""
ConnectorFactory = Callable[[Side, str, Callable[[], None]], ConnectorPair]
"""(how the engine keeps its KV, model fingerprint, wake) → a connector. ``wake`` may be called from any thread.

``kv_transfer.connector.TransferFactory`` is one; any callable that returns a ``ConnectorPair`` is another. It is used so::

    factory = TransferFactory(settings)
    pair = factory(Side(layout, num_ranks, num_kv_heads), fingerprint, wake)
    rank = pair.ranks.in_process()              # or one half in the process of each rank
    rank.start(memory)

    pair.scheduler.receiver.start_fetch(request)
    events = pair.scheduler.receiver.pop_events()       # after ``wake``: [Published(request.key)]
    pair.scheduler.receiver.receive_into(request.key, block_ids, num_cached_blocks=0)
    rank.execute(pair.scheduler.build_metadata())       # with each step, after its forward pass
    sent, received = pair.ranks.get_finished()          # later: request.key in received
    pair.scheduler.receiver.pop_received(request.key)   # the first tokens, and a report
    pair.scheduler.close()
"""


@dataclass(frozen=True)
class Transfers:
    """Everything with which an engine lends and fetches KV: how its connector is opened, and the stages that use it."""

    connect: ConnectorFactory
    stages: TransferStages


class EngineConnector:
    """A connector of which both halves are open; or none, in an engine that sends and receives no KV.

    scheduler: the half beside the scheduler. address: "host:port" of the control link, empty without a connector.
    progress: how far the connector's threads have come; from any thread, without waiting for one.
    next_arrival: returns when, on the clock, the KV of a request is expected; None if no sender has announced any.
    has_arrived: returns whether KV has arrived that ``get_finished`` has not returned; from any thread. has_work: returns
    whether the half beside the scheduler has events to process, or orders for the ranks.
    """

    def __init__(self, pair: ConnectorPair | None = None, stages: TransferStages | None = None) -> None:
        self.scheduler = pair.scheduler if pair else None
        self._stages = stages
        self.get_finished: GetFinished = pair.ranks.get_finished if pair else lambda: (set(), set())
        receiver = pair.scheduler.receiver if pair else None
        # Not methods that call these, as they are asked around every step (see ``PacedGate``).
        self.has_work: Callable[[], bool] = pair.scheduler.has_work if pair else lambda: False
        self.next_arrival: Callable[[], float | None] = receiver.next_arrival if receiver else lambda: None
        self.has_arrived: Callable[[], bool] = receiver.has_arrived if receiver else lambda: False
        self.address = pair.address if pair else ""
        self._expecting = pair.expecting if pair else None
        self.progress: Callable[[], dict[str, int]] = pair.progress if pair else dict

    def remote_kv(self, pool: BlockPool, max_length: int, timeout_seconds: float) -> RemoteKV:
        """Return what the scheduler has of the connector; see ``RemoteKV.over``."""
        if self.scheduler is None or self._stages is None:
            return RemoteKV()
        return RemoteKV.over(self.scheduler, self._stages, pool, max_length, timeout_seconds)

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

    def close(self) -> None:
        """Close the half beside the scheduler; the ranks close theirs."""
        if self.scheduler is not None:
            self.scheduler.close()


def connect(
    executor: "Executor", transfers: Transfers | None, num_ranks: int, wake: Callable[[], None]
) -> EngineConnector:
    """Open both halves of a connector for an executor with an allocated KV cache. transfers: None opens none.

    Raises SettingError if the connector does not serve ``num_ranks`` ranks.
    """
    if transfers is None:
        return EngineConnector()
    with ExitStack() as undo:
        model = executor.model_info
        pair = transfers.connect(
            Side(executor.layout, num_ranks, model.num_kv_heads), model.fingerprint, wake
        )
        connector = EngineConnector(pair, transfers.stages)
        undo.callback(connector.close)
        executor.set_connector(pair.ranks)
        undo.pop_all()
    return connector
