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

Which requests a step computes, and by how many tokens each, is decided in ``batch/`` alone. The methods of ``Scheduler``, by
which ``EngineCore`` uses it, name no policy: another one would stand behind the same methods, in place of the ``Batcher``.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from contract.errors import ErrorKind, KvbatonError
from contract.outputs import EngineOutput
from contract.requests import EngineRequest
from engine.connector import SchedulerConnector
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.batch.batching import Batcher
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.live_requests import Intake, Limits, LiveRequests
from engine.scheduling.load import Load
from engine.scheduling.remote_kv import NoTransfers, RemoteKV
from engine.scheduling.requests.finish import Finish, RequestStatus
from engine.scheduling.requests.outbox import Outbox
from engine.scheduling.requests.queues import BatchQueues
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.step_plan import StepPlan
from engine.scheduling.requests.stopping import add_bitmask
from engine.scheduling.results import Results
from engine.scheduling.stats import Totals
from engine.scheduling.waits.grammars import Grammars
from engine.scheduling.waits.waits import Deadlines, Waits, WaitStage
from engine.settings import EngineSettings


class Scheduler:
    """Decides about every unfinished request and its blocks. Called from one thread.

    remote_kv: the connector and its stages, if the engine has one. stages: what requests wait for beside their grammar and
    their KV. clock: seconds, monotonic.
    """

    def __init__(
        self,
        settings: EngineSettings,
        pool: BlockPool,
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
        # Every block has one owner, the pool; a request holds blocks by its key.
        self.pool = pool
        # The requests that could run, and the policy that gives them the steps' tokens and blocks.
        self.queues = BatchQueues()
        self.batcher = Batcher(self.queues, pool, settings, limits.max_length, self.totals, clock)
        # What other requests wait for. One whose last wait is over moves to the queues, in ``process_events``.
        self.remote_kv = remote_kv
        self.waits = Waits((*remote_kv.waits, grammars, *stages), deadlines)
        # All of them, waiting or queued, from ``intake`` until their one ``finish``.
        self.live = LiveRequests(pool, self.queues, self.waits, remote_kv, deadlines, Outbox(self.totals))
        self.intake = Intake(self.live, grammars, self.totals, limits, pool.block_size, clock)
        self._results = Results(self.live, pool, self.queues, remote_kv, self.totals, limits, clock)
        # Answers how much work there is, and whether a step would change anything.
        self.load = Load(self.live, self.queues, self.batcher, pool, self.waits, remote_kv, self.totals)

    @property
    def requests(self) -> dict[str, Request]:
        """The unfinished requests, by key."""
        return self.live.by_key

    # One step.

    def schedule(self) -> SchedulerOutput:
        """Decide one forward pass. Its result goes to ``update_from_output`` before anything else is called."""
        self.live.finish_overdue()  # first: this step may have the blocks of those that end
        self.process_events()
        return self._order(self.batcher.plan(self.remote_kv.receiver.unserved))

    def schedule_early(self, output: ModelRunnerOutput) -> SchedulerOutput | None:
        """Decide the next forward pass before ``output``, the result of this one, goes to ``update_from_output``.

        None if the results, or anything that has happened meanwhile, could change the decision.
        """
        # A transfer that has ended frees blocks, or lets a request join: this step is better decided after it.
        has_moved = output.finished_sending or output.finished_recving
        if has_moved or self.load.has_changes() or self.live.deadlines.is_due():
            return None
        plan = self.batcher.next_step.pop_if_all_continue(output)
        return self._order(plan) if plan else None

    def schedule_ahead(self, scheduled: SchedulerOutput) -> SchedulerOutput | None:
        """Decide the next forward pass while ``scheduled`` is computed; None if that, or another event, could change it."""
        has_orders = scheduled.kv_connector_metadata is not None
        if has_orders or self.live.deadlines.is_due() or not self.load.may_run_ahead():
            return None
        plan = self.batcher.next_step.plan_ahead()
        return self._order(plan, has_tokens=False) if plan else None

    def prepare_next(self, scheduled: SchedulerOutput) -> None:
        """Prepare the step after ``scheduled``, which is being computed, for the case that no request joins it."""
        if self.batcher.fair_steps.may_hold_all(self.queues.running):
            self.batcher.next_step.prepare(scheduled)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> dict[int, list[EngineOutput]]:
        """Apply a step's results; return the outputs for each client, by client index."""
        if runner_output.finished_sending or runner_output.finished_recving:
            self.on_transfers_finished(
                runner_output.finished_sending or (), runner_output.finished_recving or ()
            )
        if runner_output.was_interrupted:
            # It was prepared for requests that have sampled a token meanwhile, and they have not.
            self.batcher.next_step.drop()
            return self.live.outbox.flush()
        requests = self.live.by_key
        for key, num_tokens in scheduler_output.num_scheduled_tokens.items():
            # It may have been aborted, or have ended at the token before, while this step ran ahead.
            if running := requests.get(key):
                self._results.apply_step(running, num_tokens, runner_output)
        # The tokens that the masks of a step which runs ahead depend on are known only now.
        self.batcher.next_step.add_masks()
        return self.live.outbox.flush()

    def note_duration(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Record how long a step took."""
        self.batcher.fair_steps.note(scheduled, seconds)
        self.load.step_times.note(scheduled, seconds)

    def _order(self, plan: StepPlan, *, has_tokens: bool = True) -> SchedulerOutput:
        """Return the order to runner and connector for a planned step, and count it. has_tokens: they are known already."""
        # Before the metadata is built, so that the orders to publish go out with the step that computes these tokens.
        self.remote_kv.sender.publish(plan)
        output = plan.to_output()
        if has_tokens:
            add_bitmask(plan, output)
        # Each copy and each finished request is reported to the runner once.
        output.block_copies, self._results.block_copies = self._results.block_copies, []
        output.finished_req_ids, self.live.finished_req_ids = self.live.finished_req_ids, set()
        output.kv_connector_metadata = self.remote_kv.build_metadata()
        self.totals.num_steps += 1
        self.totals.num_preemptions += plan.num_preempted
        # Nothing has changed since this decision, except that it has queued those that it preempted.
        self.live.has_changes = plan.num_preempted > 0
        return output

    # Events of the connector and the wait stages.

    def on_transfers_finished(self, sent: Collection[str], received: Collection[str]) -> None:
        """Record transfers that the ranks have finished: ``sent`` has no reader any more, ``received`` has arrived."""
        if sent:
            self.remote_kv.sender.end_leases(sent)
            self.live.has_changes = True
        if received:
            self.remote_kv.receiver.note_arrived(received)
            self._admit_ready()

    def process_events(self) -> None:
        """Process what connector and wait stages report; requests whose sender has computed them reserve blocks."""
        self.remote_kv.receiver.take_events()
        self._admit_ready()
        self.remote_kv.receiver.reserve(self.queues.num_promised_blocks(self.pool), self.queues.waiting.first)

    def _admit_ready(self) -> None:
        for ready in self.waits.pop_ready():
            if ready.finish is not None:
                self.live.finish(ready.request, ready.finish)
            elif ready.request.received is not None:
                self._results.apply_received(ready.request)
            else:
                self.queues.waiting.add(ready.request)

    # Requests enter and finish.

    def add_request(self, engine_request: EngineRequest) -> None:
        """Queue a request; nothing runs before the next step. One that can never run is answered at once.

        Raises InvalidRequestError for a key or a transfer that is still in use, and for a transfer in an engine without a
        connector; and what a wait stage raises when it rejects the request. Then nothing has changed.
        """
        self.intake.add(engine_request)

    def reject(self, engine_request: EngineRequest, error: KvbatonError) -> None:
        """Answer a request that was not accepted with its error, among the next step's outputs."""
        self.live.has_changes = True
        self.live.outbox.add_rejection(engine_request, error)

    def finish_requests(self, keys: str | Iterable[str], status: RequestStatus) -> None:
        """Finish one request or many, whatever their status. Unknown keys are ignored."""
        for key in [keys] if isinstance(keys, str) else list(keys):
            if request := self.requests.get(key):
                self.live.finish(request, Finish(status))

    def abort_request(self, request_id: str, attempt: int | None, choice: int | None = None) -> None:
        """Abort a choice of a request (None: all) in all attempts up to ``attempt`` (None: in all), and what they lend.

        A prompt that is computed for several choices continues for those that are left.
        """
        keys = self.live.index.dismiss(request_id, attempt, choice)
        self.finish_requests(keys, RequestStatus.FINISHED_ABORTED)
        # A finished leg is in no index any more, but its KV may still be lent.
        self.remote_kv.sender.withdraw(request_id, attempt, choice)

    def fail_all(self, kind: ErrorKind, message: str) -> dict[int, list[EngineOutput]]:
        """Answer every request with an error, without touching blocks or connector: the engine is broken."""
        for request in self.requests.values():
            self.live.outbox.add(request, [], Finish.with_error(kind, message))
        self.live.clear()
        return self.live.outbox.flush()

    def shutdown(self) -> dict[int, list[EngineOutput]]:
        """Abort every request; return the last outputs."""
        self.finish_requests(list(self.requests), RequestStatus.FINISHED_ABORTED)
        return self.live.outbox.flush()

    # The cache and the connector.

    def reset_prefix_cache(self) -> bool:
        """Drop all cached content: the weights changed. Returns False, and does nothing, while a block is in use."""
        was_reset = self.pool.reset_prefix_cache()
        self.totals.prefix_cache.reset |= was_reset
        return was_reset

    def get_kv_connector(self) -> SchedulerConnector | None:
        """Return the scheduler's half of the connector; None in an engine without one."""
        connector = self.remote_kv.connector
        return None if isinstance(connector, NoTransfers) else connector
