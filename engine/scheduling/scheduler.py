"""Continuous batching: decides what each step computes, and what its results mean. Plain integers, no tensors.

A batch that runs until its longest answer ends leaves the places of the short ones empty, and lets every new request wait
for that end. So the batch is decided anew for each step, which is one forward pass: a request joins at the start of any
step, its prompt is computed in chunks as large as the step's token budget allows, each further step gives it one token,
and its place and its blocks are free after its last one. Blocks are allocated when a token needs them; if none is free, the
last request in precedence loses its own, and is recomputed later. A request is in one place at a time::

    add_request -> waits --------> queues.waiting --> queues.running -> finished
                   (a grammar,         ^  preempted        |   ^
                   remote KV)          +-------------------+   |
                     +---------------> queues.arrived ---------+
                   (KV that another worker has computed)

One step, from top to bottom:

1. ``schedule`` finishes requests that are overdue, and queues those whose waits are over. The ``Batcher`` gives the step's
   tokens and blocks to requests; it starts and preempts them. The result is an order for the runner, and for the connector.
2. The runner computes. Meanwhile ``prepare_next`` may prepare the next step, and ``schedule_ahead`` may decide it.
   ``schedule_early`` may decide it when the tokens are sampled, and not processed yet.
3. ``update_from_output`` applies the results: tokens are sent, full blocks become findable, answers finish.

Between steps, ``add_request`` queues a request or lets it wait (``intake``). A request can finish at any time: by its last
token, an error, its deadline, or ``finish_requests``. In all cases that happens in ``LiveRequests.finish``, once.

Which requests a step computes, and by how many tokens each, is decided in ``batch/`` alone, by one of the policies of
``batch/policy.py``: all else is the same for each of them. ``SchedulerInterface``, by which ``EngineCore`` uses a scheduler,
names none. ``SchedulerState`` has the parts, and answers what the engine asks of them.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from contract.cache_layout import CacheGroup
from contract.errors import ErrorKind, KvbatonError
from contract.outputs import EngineOutput
from contract.requests import EngineRequest, HandOff
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling import inspection
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.blocks.lent_blocks import num_free_blocks, num_promised_blocks
from engine.scheduling.requests.finish import Finish, RequestStatus
from engine.scheduling.requests.step_plan import StepPlan
from engine.scheduling.requests.stopping import add_bitmask
from engine.scheduling.state import SchedulerState
from engine.scheduling.tiers.kv_tiers import KVTiers


class Scheduler(SchedulerState):
    """Decides about every unfinished request and its blocks; ``SchedulerInterface`` has the contract of each method."""

    # One step.

    def schedule(self) -> SchedulerOutput:
        """Finish what is overdue, queue what is ready, and let the policy plan the step."""
        self.live.finish_overdue()  # first: this step may have the blocks of those that end
        self.process_events()
        return self._order(self.batcher.plan(self.remote_kv.receiver.unserved))

    def schedule_early(self, output: ModelRunnerOutput) -> SchedulerOutput | None:
        """Return the prepared step, unless a sampled token may end an answer, or anything else has happened."""
        # A transfer that has ended frees blocks, or lets a request join: this step is better decided after it.
        has_moved = output.finished_sending or output.finished_recving
        if has_moved or self.has_changes() or self.live.deadlines.is_due():
            return None
        plan = self.batcher.next_step.pop_if_all_continue(output)
        return self._order(plan) if plan else None

    def schedule_ahead(self, scheduled: SchedulerOutput) -> SchedulerOutput | None:
        """Return the prepared step for the tokens to come, unless something waits that they could change."""
        has_orders = scheduled.kv_connector_metadata is not None
        if has_orders or self.live.deadlines.is_due() or not self.may_run_ahead():
            return None
        plan = self.batcher.next_step.plan_ahead()
        return self._order(plan, has_tokens=False) if plan else None

    def prepare_next(self, scheduled: SchedulerOutput) -> None:
        """Prepare the step after ``scheduled``, for the case that no request joins it."""
        if self.batcher.fair_steps.may_hold_all(self.queues.running):
            self.batcher.next_step.prepare(scheduled)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> dict[int, list[EngineOutput]]:
        """Apply the results to each request of the step; return the outputs by client index."""
        if runner_output.finished_sending or runner_output.finished_recving:
            self.on_transfers_finished(
                runner_output.finished_sending or (), runner_output.finished_recving or ()
            )
        if runner_output.was_interrupted:
            # It was prepared for requests that have sampled a token meanwhile, and they have not.
            self.batcher.next_step.drop()
            return self.live.outbox.flush()
        requests = self.live.by_key
        for key in scheduler_output.num_scheduled_tokens:
            # It may have been aborted, or have ended at the token before, while this step ran ahead.
            if running := requests.get(key):
                self._results.apply_step(running, scheduler_output, runner_output)
        # The tokens that the masks of a step which runs ahead depend on are known only now.
        self.batcher.next_step.add_masks()
        if self.remote_kv.tiers is not None:
            self._advance(self.remote_kv.tiers)
        return self.live.outbox.flush()

    def note_duration(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Give the length of a step to those that average it."""
        self.batcher.note(scheduled, seconds)
        self.step_times.note(scheduled, seconds)

    def _order(self, plan: StepPlan, *, has_tokens: bool = True) -> SchedulerOutput:
        """Return the order to runner and connector for a planned step, and count it. has_tokens: they are known already."""
        # Before the metadata is built, so that the orders to publish go out with the step that computes these tokens.
        self.remote_kv.sender.publish(plan)
        output = plan.to_output()
        if self.batcher.drafting is not None:
            self.batcher.drafting.request_drafts(plan, output)
        if has_tokens:
            add_bitmask(plan, output)
        # Each copy and each finished request is reported to the runner once.
        output.block_copies = self._results.block_copies.pop()
        output.finished_req_ids, self.live.finished_req_ids = self.live.finished_req_ids, set()
        output.kv_connector_metadata = self.remote_kv.build_metadata()
        self.totals.num_steps += 1
        self.totals.num_preemptions += plan.num_preempted
        # Nothing has changed since this decision, except that it has queued those that it preempted.
        self.live.has_changes = plan.num_preempted > 0
        return output

    # Events of the connector and the wait stages.

    def on_transfers_finished(self, sent: Collection[str], received: Collection[str]) -> None:
        """End the leases on what was sent; let requests continue whose KV has arrived."""
        if sent:
            self.remote_kv.sender.end_leases(sent)
            self.live.has_changes = True
        if received:
            self.remote_kv.receiver.note_arrived(received)
            self._admit_ready()

    def process_events(self) -> None:
        """Queue what is ready; requests whose sender has computed them reserve blocks."""
        self.remote_kv.receiver.process_events()
        self._admit_ready()
        self.remote_kv.receiver.reserve(self.queues.promised_blocks(self.pool), self.queues.waiting.first)

    def _admit_ready(self) -> None:
        for ready in self.waits.pop_ready():
            if ready.finish is not None:
                self.live.finish(ready.request, ready.finish)
            elif ready.request.received is not None:
                self._results.apply_received(ready.request)
            else:
                came_from_tier = self.pool.num_blocks_of(ready.request.key)
                queue = self.queues.arrived if came_from_tier else self.queues.waiting
                queue.add(ready.request)
                # The gate may delay the step; what it was asked for is no longer pending then.
                self.live.has_changes = True

    def _advance(self, tiers: KVTiers) -> None:
        """Let the tiers copy, behind a step and before the next one is planned: blocks that are copied are held by then."""
        num_free = num_free_blocks(self.pools)
        is_idle = not self.queues.running.requests
        tiers.advance(self._num_spare_blocks, self.batcher.preemption.next_tables, is_idle=is_idle)
        is_awaited = self.queues.waiting.requests or self.remote_kv.receiver.unserved
        if is_awaited and num_free_blocks(self.pools) > num_free:
            self.live.has_changes = True

    def _num_spare_blocks(self, group: CacheGroup, pool: BlockPool) -> int:
        """Return how many free blocks of a group no running request lacks, now or for its next token."""
        numbers = self.queues.promised_blocks(self.pool)
        return pool.num_available_blocks - num_promised_blocks(self.pools, group, numbers) - len(numbers)

    # Requests enter and finish.

    def add_request(self, engine_request: EngineRequest) -> None:
        """Check a request, and queue it or start its waits. Raises what a wait stage raises, too."""
        self.intake.add(engine_request)

    def reject(self, engine_request: EngineRequest, error: KvbatonError) -> None:
        """Answer a request that was not accepted with its error."""
        self.live.has_changes = True
        self.live.outbox.add_rejection(engine_request, error)

    def prepare(self, engine_request: EngineRequest, then: Callable[[], None]) -> None:
        """Compile the grammar of a request that may come."""
        self.intake.prepare(engine_request, then)

    def hand_off(self, order: HandOff) -> None:
        """Finish a request that decodes, and lend its KV to the attempt that continues it."""
        self.live.hand_off(order)

    def finish_requests(self, keys: str | Iterable[str], status: RequestStatus) -> None:
        """Finish requests by key, whatever their status."""
        for key in [keys] if isinstance(keys, str) else list(keys):
            if request := self.requests.get(key):
                self.live.finish(request, Finish(status))

    def abort_request(self, request_id: str, attempt: int | None, choice: int | None = None) -> None:
        """Abort attempts of a request, or of one choice, and withdraw what those that have finished still lend."""
        keys = self.live.index.dismiss(request_id, attempt, choice)
        self.finish_requests(keys, RequestStatus.FINISHED_ABORTED)
        # A finished leg is in no index any more, but its KV may still be lent.
        self.remote_kv.sender.withdraw(request_id, attempt, choice)

    def fail_all(self, kind: ErrorKind, message: str) -> dict[int, list[EngineOutput]]:
        """Answer every request with an error, and touch nothing else: the engine is broken."""
        for request in self.requests.values():
            self.live.outbox.add(request, [], Finish.with_error(kind, message))
        self.live.clear()
        return self.live.outbox.flush()

    def shutdown(self) -> dict[int, list[EngineOutput]]:
        """Abort every request; return the last outputs."""
        self.finish_requests(list(self.requests), RequestStatus.FINISHED_ABORTED)
        if self.remote_kv.tiers is not None:
            self.remote_kv.tiers.flush()
        return self.live.outbox.flush()

    def flush_urgent(self) -> dict[int, list[EngineOutput]]:
        """Return all outputs until now if one of them cannot wait for the next step."""
        return self.live.outbox.flush() if self.live.outbox.is_urgent else {}

    # The cache, and views of the whole.

    def reset_prefix_cache(self, model_fingerprint: str | None = None) -> bool:
        """See SchedulerInterface."""
        tiers = self.remote_kv.tiers
        if tiers is not None:
            tiers.settle()  # blocks that are held for a copy are not in use
        was_reset = self.pools.reset_prefix_cache()
        if was_reset:
            if tiers is not None:
                tiers.reset(model_fingerprint)
            self.intake.model_fingerprint = model_fingerprint or self.intake.model_fingerprint
        self.totals.prefix_cache.reset |= was_reset
        return was_reset

    def counters(self) -> dict[str, float]:
        """Return all counters since the start, including the connector's."""
        return inspection.counters(self)

    def debug_state(self) -> dict[str, Any]:
        """Return blocks by state, leases, requests by status, and the connector's own view."""
        return inspection.debug_state(self)

    def check_integrity(self) -> None:
        """Raise AssertionError unless only live requests and leases hold blocks, and each request is in one place."""
        inspection.check_integrity(self)
