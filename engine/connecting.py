"""An engine's connector: its half beside the scheduler, and what connects it with the executor's ranks."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from contract.cache_layout import GroupedSide
from contract.layout import Side
from contract.requests import EngineRequest, ReceiveTransfer
from engine.connector import ConnectorPair
from engine.kv_tiers.storage import TierStorage
from engine.scheduling.blocks.block_pool import blocks_needed
from engine.scheduling.blocks.cache_pools import CachePools
from engine.scheduling.remote_kv import RemoteKV, TransferStages
from engine.scheduling.tiers.kv_tiers import KVTiers
from engine.scheduling.tiers.loads import TierLoads
from engine.scheduling.tiers.swapped_states import SwappedStates
from engine.scheduling.tiers.tier import Tier
from engine.scheduling.tiers.write_behind import WriteBehind, watermark
from engine.settings import EngineSettings

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
OpenLoads = Callable[[CachePools, float], TierLoads]
"""(pools, seconds for which a request may wait) → the wait for blocks of KV tiers."""


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
    whether the half beside the scheduler has events to process, or orders for the ranks. open_loads: makes the wait for
    blocks of KV tiers; None without tiers.
    """

    def __init__(
        self,
        pair: ConnectorPair | None = None,
        stages: TransferStages | None = None,
        open_loads: OpenLoads | None = None,
    ) -> None:
        self.scheduler = pair.scheduler if pair else None
        self._stages = stages
        self._open_loads = open_loads
        self.get_finished: GetFinished = pair.ranks.get_finished if pair else lambda: (set(), set())
        receiver = pair.scheduler.receiver if pair else None
        # Not methods that call these, as they are asked around every step (see ``PacedGate``).
        self.has_work: Callable[[], bool] = pair.scheduler.has_work if pair else lambda: False
        self.next_arrival: Callable[[], float | None] = receiver.next_arrival if receiver else lambda: None
        self.has_arrived: Callable[[], bool] = receiver.has_arrived if receiver else lambda: False
        self.address = pair.address if pair else ""
        self._expecting = pair.expecting if pair else None
        self.progress: Callable[[], dict[str, int]] = pair.progress if pair else dict

    def remote_kv(self, pools: CachePools, max_length: int, timeout_seconds: float) -> RemoteKV:
        """Return what the scheduler has of the connector; see ``RemoteKV.over``."""
        loads = self._open_loads(pools, timeout_seconds) if self._open_loads else None
        if self.scheduler is None or self._stages is None:
            return RemoteKV(loads=loads)
        return RemoteKV.over(self.scheduler, self._stages, pools, max_length, timeout_seconds, loads)

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
    executor: "Executor",
    transfers: Transfers | None,
    settings: EngineSettings,
    on_event: Callable[[], None],
    wake: Callable[[], None],
) -> EngineConnector:
    """Open both halves of a connector, and the KV tiers, for an executor with an allocated KV cache.

    transfers: None opens no connector. on_event, wake: called from any thread when the connector has events, and when a tier
    has some. Raises SettingError if the connector does not serve so many ranks, and for a tier that cannot be.
    """
    storages = executor.open_kv_tiers(settings)
    num_step_blocks = blocks_needed(settings.max_num_batched_tokens, settings.block_size)
    open_loads = partial(_tier_loads, storages, wake, num_step_blocks) if storages else None
    if transfers is None:
        return EngineConnector(open_loads=open_loads)
    with ExitStack() as undo:
        model = executor.model_info
        side = Side(executor.layout, settings.tensor_parallel_size, model.num_kv_heads)
        if (config := executor.kv_cache_config) is not None:
            cache = config.cache
            sizes = settings.tensor_parallel_size, model.num_kv_heads
            side = GroupedSide.of(cache.groups, *sizes, cache.states)
        pair = transfers.connect(side, model.fingerprint, on_event)
        connector = EngineConnector(pair, transfers.stages, open_loads)
        undo.callback(connector.close)
        executor.set_connector(pair.ranks)
        undo.pop_all()
    return connector


def _tier_loads(
    storages: Sequence[TierStorage],
    wake: Callable[[], None],
    num_step_blocks: int,
    pools: CachePools,
    timeout_seconds: float,
) -> TierLoads:
    groups: list[list[WriteBehind]] = [[] for _ in pools.pools]
    swapped: list[Tier] = []
    for storage in storages:
        if storage.group == len(pools.pools):
            swapped.append(Tier(storage))
            continue
        pool = pools.pools[storage.group]
        num_guarded = watermark(pool.num_usable_blocks, num_step_blocks)
        groups[storage.group].append(WriteBehind(Tier(storage), pool, num_guarded, wake))
    states = None if pools.states is None else SwappedStates(pools.states, swapped)
    return TierLoads(KVTiers(pools, groups, states), pools, timeout_seconds, wake)
