"""Decides what each step computes, and what its results mean. Plain integers, no tensors.

One step, from top to bottom:

1. ``schedule`` finishes requests that are overdue, and queues those whose waits are over (``waits``: for a grammar, or for
   KV that another worker computes). The ``Batcher`` gives the step's tokens and blocks to requests; it starts and preempts
   them. The result is an order for the runner, and for the connector (``remote_kv``).
2. The runner computes. Meanwhile ``draft_next`` may prepare the next step, and ``schedule_ahead`` may decide it.
3. ``update_from_output`` applies the results: tokens are sent, full blocks become findable, answers finish.

Between steps, ``add_request`` queues a request or lets it wait (``intake``). A request can finish at any time: by its last
token, an error, its deadline, or ``finish_requests``. In all cases that happens in ``LiveRequests.finish``, once.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from contract.errors import ErrorKind, KvbatonError
from contract.outputs import EngineOutput
from contract.requests import EngineRequest
from engine.connector import ReceiverConnector, SchedulerConnector
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.batch.batching import Batcher
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.intake import Intake
from engine.scheduling.live_requests import LiveRequests
from engine.scheduling.load import Load
from engine.scheduling.remote.kv_receiver import KVReceiver
from engine.scheduling.remote.kv_sender import KVSender
from engine.scheduling.remote.remote_kv import RemoteKV
from engine.scheduling.requests.finish import Finish
from engine.scheduling.requests.grammar_matching import add_bitmask
from engine.scheduling.requests.limits import Limits
from engine.scheduling.requests.outbox import Outbox
from engine.scheduling.requests.queues import BatchQueues
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.status import RequestStatus
from engine.scheduling.requests.step_plan import StepPlan
from engine.scheduling.results import Results
from engine.scheduling.stats import Totals
from engine.scheduling.waits.deadlines import Deadlines
from engine.scheduling.waits.grammars import Grammars
from engine.scheduling.waits.waits import Waits, WaitStage
from engine.settings import EngineSettings


class Scheduler:
    """Decides about every unfinished request and its blocks. Called from one thread.

    max_model_len: tokens that prompt and answer may have together. vocab_size: bounds the token ids that another
    worker may send. stages: what requests wait for beside their grammar and their KV. clock: seconds, monotonic.

    A request enters by ``intake``, is in ``waits`` or in ``queues`` while it is ``live``, and advances by ``_results``.
    ``load`` answers how much work there is.
    """

    def __init__(
        self,
        settings: EngineSettings,
        pool: BlockPool,
        *,
        max_model_len: int,
        vocab_size: int,
        model_fingerprint: str,
        connector: SchedulerConnector | None = None,
        grammars: Grammars | None = None,
        stages: Sequence[WaitStage] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = Limits.of(pool, max_model_len, vocab_size, model_fingerprint)
        grammars = grammars or Grammars(None, settings.max_grammar_bytes, settings.grammar_timeout_seconds)
        deadlines = Deadlines(clock)
        self.pool = pool
        self.totals = Totals()
        self.queues = BatchQueues()
        self.batcher = Batcher(self.queues, pool, settings, limits.max_length, self.totals, clock)
        self.remote_kv = RemoteKV()
        own_stages: tuple[WaitStage, ...] = (grammars,)
        if connector is not None:
            sender = KVSender(connector.sender, pool, limits.max_length)
            receiver = self.make_receiver(connector.receiver, settings)
            self.remote_kv = RemoteKV(connector, sender, receiver)
            own_stages = receiver, grammars
        self.waits = Waits((*own_stages, *stages), deadlines)
        self.live = LiveRequests(
            pool, self.queues, self.waits, self.remote_kv, deadlines, Outbox(self.totals)
        )
        self.intake = Intake(self.live, grammars, self.totals, limits, pool.block_size, clock)
        self._results = Results(self.live, pool, self.queues, self.remote_kv, self.totals, limits, clock)
        self.load = Load(self.live, self.queues, self.batcher, pool, self.waits, self.remote_kv, self.totals)

    @property
    def requests(self) -> dict[str, Request]:
        """The unfinished requests, by key."""
        return self.live.by_key

    # One step.

    def schedule(self) -> SchedulerOutput:
        """Decide one forward pass. Its result goes to ``update_from_output`` before anything else is called."""
        self.live.finish_overdue()
        self.process_events()
        return self._order(self.batcher.plan(self.remote_kv.unserved))

    def schedule_early(self, output: ModelRunnerOutput) -> SchedulerOutput | None:
        """Decide the next forward pass before ``output``, the result of this one, goes to ``update_from_output``.

        None if the results, or anything that has happened meanwhile, could change the decision.
        """
        has_moved = output.finished_sending or output.finished_recving
        if has_moved or self.load.has_changes() or self.live.deadlines.is_due():
            return None
        plan = self.batcher.drafts.take_if_all_continue(output)
        return self._order(plan) if plan else None

    def schedule_ahead(self, scheduled: SchedulerOutput) -> SchedulerOutput | None:
        """Decide the next forward pass while ``scheduled`` is computed; None if that, or another event, could change it."""
        has_orders = scheduled.kv_connector_metadata is not None
        if has_orders or self.live.deadlines.is_due() or not self.load.may_run_ahead():
            return None
        plan = self.batcher.drafts.take_ahead()
        return self._order(plan, has_tokens=False) if plan else None

    def draft_next(self, scheduled: SchedulerOutput) -> None:
        """Prepare the step after ``scheduled``, which is being computed, for the case that no request joins it."""
        self.batcher.draft(scheduled)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> dict[int, list[EngineOutput]]:
        """Apply a step's results; return the outputs for each client, by client index."""
        self.on_transfers_finished(runner_output.finished_sending or (), runner_output.finished_recving or ())
        if runner_output.was_interrupted:
            self.batcher.drafts.drop()
            return self.live.outbox.take()
        requests = self.requests
        for key, num_tokens in scheduler_output.num_scheduled_tokens.items():
            if running := requests.get(key):
                self._results.apply_step(running, num_tokens, runner_output)
        self.batcher.drafts.add_masks()
        return self.live.outbox.take()

    def note_duration(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Record how long a step took."""
        self.batcher.fair_steps.note(scheduled, seconds)
        self.load.step_times.note(scheduled, seconds)

    def _order(self, plan: StepPlan, *, has_tokens: bool = True) -> SchedulerOutput:
        """Return the order to runner and connector for a planned step, and count it. has_tokens: they are known already."""
        self.remote_kv.publish(plan)
        output = plan.to_output()
        if has_tokens:
            add_bitmask(plan, output)
        output.block_copies = self._results.forking.take_copies()
        output.finished_req_ids = self.live.take_finished()
        output.kv_connector_metadata = self.remote_kv.build_metadata()
        self.totals.num_steps += 1
        self.totals.num_preemptions += plan.num_preempted
        self.live.has_changes = plan.num_preempted > 0
        return output

    # Events of the connector and the wait stages.

    def on_transfers_finished(self, sent: Collection[str], received: Collection[str]) -> None:
        """Record transfers that the ranks have finished: ``sent`` has no reader any more, ``received`` has arrived."""
        if sent:
            self.remote_kv.end_leases(sent)
            self.live.has_changes = True
        if received:
            self.remote_kv.note_arrived(received)
            self._admit_ready()

    def process_events(self) -> None:
        """Process what connector and wait stages report; requests whose sender has computed them reserve blocks."""
        self.remote_kv.take_events()
        self._admit_ready()
        self.remote_kv.reserve(self.queues.num_promised_blocks(self.pool), self.queues.waiting.first)

    def _admit_ready(self) -> None:
        for ready in self.waits.take_ready():
            if ready.finish is not None:
                self.live.finish(ready.request, ready.finish)
            elif ready.request.received is not None:
                self._results.apply_received(ready.request)
            else:
                self.queues.waiting.add(ready.request)

    # Requests enter and finish.

    def add_request(self, asked: EngineRequest) -> None:
        """Queue a request; nothing runs before the next step. One that can never run is answered at once.

        Raises InvalidRequestError for a key or a transfer that is still in use, and for a transfer in an engine without a
        connector; and what a wait stage raises when it rejects the request. Then nothing has changed.
        """
        self.intake.add(asked)

    def reject(self, asked: EngineRequest, error: KvbatonError) -> None:
        """Answer a request that was not accepted with its error, among the next step's outputs."""
        self.live.has_changes = True
        self.live.outbox.add_rejection(asked, error)

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
        self.remote_kv.withdraw(request_id, attempt, choice)

    def fail_all(self, kind: ErrorKind, message: str) -> dict[int, list[EngineOutput]]:
        """Answer every request with an error, without touching blocks or connector: the engine is broken."""
        for request in self.requests.values():
            self.live.outbox.add(request, [], Finish.with_error(kind, message))
        self.live.clear()
        return self.live.outbox.take()

    def shutdown(self) -> dict[int, list[EngineOutput]]:
        """Abort every request; return the last outputs."""
        self.finish_requests(list(self.requests), RequestStatus.FINISHED_ABORTED)
        return self.live.outbox.take()

    # The cache and the connector.

    def reset_prefix_cache(self) -> bool:
        """Drop all cached content: the weights changed. Returns False, and does nothing, while a block is in use."""
        was_reset = self.pool.reset_prefix_cache()
        self.totals.prefix_cache.reset |= was_reset
        return was_reset

    def get_kv_connector(self) -> SchedulerConnector | None:
        """Return the scheduler's half of the connector."""
        return self.remote_kv.connector

    def make_receiver(self, connector: ReceiverConnector, settings: EngineSettings) -> KVReceiver:
        """Return the wait stage of KV that comes from another worker."""
        return KVReceiver(connector, self.pool, settings.remote_kv_timeout_seconds)
