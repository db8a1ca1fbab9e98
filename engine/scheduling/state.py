"""The parts of a scheduler, and its answers to questions about its work, which change nothing."""

import time
from collections.abc import Callable, Sequence

from engine.connector import SchedulerConnector
from engine.scheduling.batch.batching import Batcher
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.blocks.cache_pools import CachePools
from engine.scheduling.interface import SchedulerInterface
from engine.scheduling.live_requests import Intake, Limits, LiveRequests
from engine.scheduling.remote_kv import NoTransfers, RemoteKV
from engine.scheduling.requests.finish import RequestStatus
from engine.scheduling.requests.outbox import Outbox
from engine.scheduling.requests.queues import BatchQueues
from engine.scheduling.requests.request import Request
from engine.scheduling.results import Results
from engine.scheduling.stats import SchedulerStats, StepTimes, Totals
from engine.scheduling.waits.grammars import Grammars
from engine.scheduling.waits.waits import Deadlines, Waits, WaitStage
from engine.settings import EngineSettings


class SchedulerState(SchedulerInterface):
    """Owns the parts of a ``Scheduler``, each of which owns a part of its state.

    remote_kv: the connector and its stages, if the engine has one. stages: what requests wait for beside their grammar and
    their KV. clock: seconds, monotonic. step_times: of the steps so far.
    """

    def __init__(
        self,
        settings: EngineSettings,
        pools: CachePools,
        limits: Limits,
        *,
        remote_kv: RemoteKV,
        grammars: Grammars | None = None,
        stages: Sequence[WaitStage] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        grammars = grammars or Grammars(None, settings.max_grammar_bytes, settings.grammar_timeout_seconds)
        deadlines = Deadlines(clock)
        self.totals = Totals()
        # Every block has one owner, a pool; a request holds blocks by its key.
        self.pools = pools
        # The requests that could run; ``batcher`` is the policy that gives them the steps' tokens and blocks.
        self.queues = BatchQueues()
        # What other requests wait for. One whose last wait is over moves to the queues, in ``process_events``.
        self.remote_kv = remote_kv
        self.waits = Waits((*remote_kv.waits, grammars, *stages), deadlines)
        self.batcher = Batcher(
            self.queues, pools, settings, limits.max_length, self.totals, clock, self.waits, remote_kv.loads
        )
        # All of them, waiting or queued, from ``intake`` until their one ``finish``.
        self.live = LiveRequests(pools, self.queues, self.waits, remote_kv, deadlines, Outbox(self.totals))
        self.intake = Intake(self.live, grammars, self.totals, limits, pools.block_size, clock)
        self._results = Results(
            self.live, pools, self.queues, remote_kv, self.totals, limits, clock, self.batcher.drafting
        )
        self.step_times = StepTimes()

    @property
    def pool(self) -> BlockPool:
        """The pool of the first group."""
        return self.pools.first

    @property
    def requests(self) -> dict[str, Request]:
        """The unfinished requests, by key."""
        return self.live.by_key

    def needs_step(self) -> bool:
        """See SchedulerInterface."""
        tiers = self.remote_kv.tiers
        # What a tier has stored is recorded after any step; it is no reason to decide a step anew.
        is_awaited = tiers is not None and tiers.needs_step
        return bool(self.queues.running.requests) or self.has_changes() or is_awaited

    def has_changes(self) -> bool:
        """Return whether something has happened since the last step was decided."""
        live = self.live
        is_changed = (
            live.has_changes or live.finished_req_ids or live.outbox.outputs or self.waits.has_pending
        )
        return bool(is_changed) or self.remote_kv.connector.has_work()

    def may_run_ahead(self) -> bool:
        """Return whether nothing has happened that the next step must consider.

        Requests that have finished only make room, which matters if another one waits for it.
        """
        live = self.live
        if live.outbox.outputs or self.waits.has_pending or self.remote_kv.connector.has_work():
            return False
        # Only a request that waits can use the room of those that have finished.
        is_awaited = (
            self.queues.waiting.requests or self.queues.arrived.requests or self.remote_kv.receiver.unserved
        )
        return not (is_awaited and (live.has_changes or live.finished_req_ids))

    def is_decode_only(self) -> bool:
        """See SchedulerInterface."""
        return (
            bool(self.queues.running.requests or self.queues.arrived.requests)
            and not self.queues.waiting.requests
        )

    def has_room(self) -> bool:
        """See SchedulerInterface."""
        return self.batcher.admission.has_room

    def seconds_to_pause(self) -> float:
        """See SchedulerInterface."""
        queues = self.queues
        return self.batcher.fair_steps.seconds_to_pause(queues.running, queues.arrived, queues.waiting)

    def next_deadline(self) -> float | None:
        """See SchedulerInterface."""
        return self.live.deadlines.next()

    def is_free(self) -> bool:
        """See SchedulerInterface."""
        return not (self.live.by_key or self.live.outbox.outputs or self.remote_kv.sender.leases)

    def get_request_counts(self) -> tuple[int, int]:
        """See SchedulerInterface."""
        num_running = len(self.queues.running.requests)
        return num_running, len(self.live.by_key) - num_running

    def has_finished_requests(self) -> bool:
        """See SchedulerInterface."""
        return bool(self.live.finished_req_ids)

    def get_kv_connector(self) -> SchedulerConnector | None:
        """See SchedulerInterface."""
        connector = self.remote_kv.connector
        return None if isinstance(connector, NoTransfers) else connector

    def make_stats(self) -> SchedulerStats:
        """See SchedulerInterface."""
        num_running, num_waiting = self.get_request_counts()
        drafts = self.totals.spec_decoding
        return SchedulerStats(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            kv_cache_usage=self.pools.usage,
            num_queued_prompt_tokens=self.queues.num_queued_prompt_tokens(),
            num_free_blocks=self.pool.num_free_blocks,
            num_leases=len(self.remote_kv.sender.leases),
            num_fetches=len(self.remote_kv.receiver.waiting),
            prefill_seconds_per_token=self.step_times.prefill_seconds_per_token,
            step_seconds=self.step_times.seconds,
            prefix_cache_stats=self.totals.prefix_cache,
            num_corrupted_reqs=self.totals.num_corrupted,
            num_swapped_reqs=len(self.swapped_requests()),
            spec_decoding_stats=drafts if drafts.num_spec_tokens else None,
        )

    def swapped_requests(self) -> list[Request]:
        """Return the preempted requests of which a tier has blocks."""
        tiers = self.remote_kv.tiers
        if tiers is None:
            return []
        return [
            request
            for request in self.queues.waiting.requests
            if request.status is RequestStatus.PREEMPTED and tiers.has_part_of(request)
        ]
