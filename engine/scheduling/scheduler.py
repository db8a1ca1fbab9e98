"""Decides what each step computes, and what its results mean. Plain integers, no tensors.

``add_request`` queues a request, or lets it wait (``Waits``) for its grammar or for KV that another worker computes.
``schedule`` ends what is overdue, admits the requests whose waits are over, has the ``Batcher`` share out the tokens and
blocks of the step, and orders what prefill legs have to publish (``KVSender``). ``update_from_output`` processes what was
computed (``Results``): tokens go out, full blocks become findable, answers end. Any request can end at any time, by
``finish_requests`` or by its deadline; whatever the way, it ends in ``LiveRequests.finish``, once.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from contract.errors import ErrorKind, InvalidRequestError, KvbatonError
from contract.requests import EngineOutput, EngineRequest
from engine.connector import ReceiverConnector, SchedulerConnector
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.batching import Batcher
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.deadlines import Deadlines
from engine.scheduling.ending import Ending, RequestStatus, ended_by_error, ended_late, refused
from engine.scheduling.grammars import Grammars
from engine.scheduling.live_requests import LiveRequests
from engine.scheduling.outbox import Outbox
from engine.scheduling.remote_kv import KVReceiver, KVSender, check_transfer
from engine.scheduling.request import Request, why_impossible
from engine.scheduling.results import Limits, Results
from engine.scheduling.stats import PrefixCacheStats, SchedulerStats, Totals
from engine.scheduling.step_plan import StepPlan
from engine.scheduling.waits import Waits, WaitStage
from engine.settings import EngineSettings


class Scheduler:
    """Decides about every unfinished request and its blocks. Called from one thread.

    max_model_len: tokens that prompt and answer may have together. vocab_size: bounds the token ids that another
    worker may send. stages: what requests wait for beside their grammar and their KV. clock: seconds, monotonic.
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
        self.pool = pool
        self.totals = Totals()
        self.prefix_stats = PrefixCacheStats()
        self._model_fingerprint = model_fingerprint
        self._connector = connector
        self._clock = clock
        self._max_length = min(max_model_len, pool.num_usable_blocks * pool.block_size)
        self.batcher = Batcher(pool, settings, self._max_length, clock)
        self.sender = KVSender(connector.sender, pool, self._max_length) if connector is not None else None
        self.receiver = self.make_receiver(connector.receiver, settings) if connector is not None else None
        self.grammars = grammars or Grammars(
            None, settings.max_grammar_bytes, settings.grammar_timeout_seconds
        )
        self._deadlines = Deadlines()
        own_stages = (self.receiver, self.grammars) if self.receiver else (self.grammars,)
        self.waits = Waits((*own_stages, *stages), self._deadlines, clock)
        self._outbox = Outbox(self.totals)
        self.live = LiveRequests(pool, self.batcher, self.waits, self.sender, self._deadlines, self._outbox)
        self._results = Results(
            self.live,
            pool,
            self.batcher,
            self.sender,
            self.grammars,
            self._outbox,
            self.totals,
            Limits(self._max_length, vocab_size),
            clock,
        )

    def make_receiver(self, connector: ReceiverConnector, settings: EngineSettings) -> KVReceiver:
        """Return the stage of requests whose KV comes from another worker."""
        return KVReceiver(connector, self.pool, settings.remote_kv_timeout_seconds)

    @property
    def requests(self) -> dict[str, Request]:
        """The unfinished requests, by key."""
        return self.live.by_key

    # One step.

    def schedule(self) -> SchedulerOutput:
        """Decide one forward pass. Its result goes to ``update_from_output`` before anything else is called."""
        self._end_overdue()
        self.take_news()
        return self._order(self.batcher.plan(self.receiver.unserved if self.receiver else None))

    def go_on(self, output: ModelRunnerOutput) -> SchedulerOutput | None:
        """Return the next step's orders if neither the results of this one, processed later, nor news can change them."""
        due = self.next_deadline()
        has_moved = output.finished_sending or output.finished_recving
        if has_moved or self._has_any_news() or (due is not None and due <= self._clock()):
            return None
        plan = self.batcher.go_on(output)
        return self._order(plan) if plan else None

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> dict[int, list[EngineOutput]]:
        """Process a step's results; return the outputs for each client, by client index."""
        self.on_transfers_finished(runner_output.finished_sending or (), runner_output.finished_recving or ())
        if runner_output.was_cut_short:
            self.batcher.drop_draft()
            return self._outbox.take()
        for key, num_tokens in scheduler_output.num_scheduled_tokens.items():
            if running := self.requests.get(key):
                self._results.apply_step(running, num_tokens, runner_output)
        return self._outbox.take()

    def draft_next(self, scheduled: SchedulerOutput) -> None:
        """Prepare the step after this one, which is being computed, for the case that nothing joins it."""
        self.batcher.draft(scheduled)

    def note_duration(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Record how long a step took."""
        self.batcher.fair_steps.note(scheduled, seconds)

    def on_transfers_finished(self, sent: Collection[str], received: Collection[str]) -> None:
        """Record transfers that the ranks have finished: ``sent`` is not read any more, all of ``received`` has arrived."""
        if self.sender and sent:
            self.sender.take_back(sent)
            self.live.has_news = True
        if self.receiver and received:
            self.receiver.note_arrived(received)
            self._admit_ready()

    def take_news(self) -> None:
        """Process what the connector and the wait stages report; requests whose sender has computed them get blocks."""
        if self.receiver:
            self.receiver.take_events()
        self._admit_ready()
        if self.receiver:
            self.receiver.reserve(self.batcher.num_promised_blocks, self.batcher.waiting.first)

    # Requests come and go.

    def add_request(self, asked: EngineRequest) -> None:
        """Queue a request; nothing runs before the next step. One that can never run is answered at once.

        Raises InvalidRequestError for a key or a transfer that is still in use, or a transfer in an engine without a
        connector; and what a wait stage raises when it refuses the request. Then nothing has changed.
        """
        is_lent = self.sender is not None and asked.key in self.sender.leases
        is_here = any(key in self.requests for key in asked.keys)
        if is_here or is_lent or self.pool.is_quarantined(asked.key):
            raise InvalidRequestError(f"request {asked.key} is here already; a replay needs a higher attempt")
        if asked.transfer:
            check_transfer(asked, self.sender, self.live.index)
        self.grammars.check(asked)
        request = Request.from_engine_request(
            asked,
            self._model_fingerprint,
            self.pool.block_size,
            now=self._clock(),
            arrival_number=self.totals.num_requests,
        )
        self.totals.num_requests += asked.num_choices
        self.live.has_news = True
        if reason := why_impossible(request, self._max_length, self.pool.num_usable_blocks):
            self._outbox.tokens(request, [], refused(reason))
            return
        if not self.waits.start(request):
            self.batcher.waiting.add(request)
        self.live.register(request)

    def reject(self, asked: EngineRequest, error: KvbatonError) -> None:
        """Answer a request that was not accepted with its error, among the next step's outputs."""
        self.live.has_news = True
        self._outbox.refusal(asked, error)

    def finish_requests(self, keys: str | Iterable[str], status: RequestStatus) -> None:
        """End one request or many from outside, in whatever state they are. Unknown keys are ignored."""
        for key in [keys] if isinstance(keys, str) else list(keys):
            if request := self.requests.get(key):
                self.live.finish(request, Ending(status))

    def abort_request(self, request_id: str, attempt: int | None, choice: int | None = None) -> None:
        """End a choice of a request (None: all), of all attempts up to ``attempt`` (None: of all), and what they still lend.

        A prompt that is computed for several choices goes on for those that are left.
        """
        keys = self.live.index.dismiss(request_id, attempt, choice)
        self.finish_requests(keys, RequestStatus.FINISHED_ABORTED)
        if self.sender:
            self.sender.withdraw(request_id, attempt, choice)

    def fail_all(self, kind: ErrorKind, message: str) -> dict[int, list[EngineOutput]]:
        """Answer every request with an error, without touching blocks or connector: the engine is broken."""
        for request in self.requests.values():
            self._outbox.tokens(request, [], ended_by_error(kind, message))
        self.live.clear()
        return self._outbox.take()

    def shutdown(self) -> dict[int, list[EngineOutput]]:
        """Abort every request; return the last outputs."""
        self.finish_requests(list(self.requests), RequestStatus.FINISHED_ABORTED)
        return self._outbox.take()

    # Questions.

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests have not ended."""
        return len(self.requests)

    def has_unfinished_requests(self) -> bool:
        """Return whether a request has not ended."""
        return bool(self.requests)

    def has_finished_requests(self) -> bool:
        """Return whether a request has ended that the runner was not told to forget."""
        return bool(self.live.finished_req_ids)

    def has_requests(self) -> bool:
        """Return whether a request has not ended, or the runner was not told to forget it."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    def get_request_counts(self) -> tuple[int, int]:
        """Return (running, waiting); a request that waits for KV from another worker counts as waiting."""
        return len(self.batcher.running), len(self.requests) - len(self.batcher.running)

    def needs_step(self) -> bool:
        """Return whether a step could change something: False while all wait for events, blocks or deadlines."""
        return bool(self.batcher.running) or self._has_any_news()

    def _has_any_news(self) -> bool:
        live = self.live
        has_own = live.has_news or live.finished_req_ids or self.waits.has_pending or self._outbox
        return bool(has_own) or (self._connector is not None and self._connector.has_work())

    def has_answers_only(self) -> bool:
        """Return whether the next step holds answers, and no prompt waits."""
        return bool(self.batcher.running or self.batcher.arrived) and not self.batcher.waiting

    def has_room(self) -> bool:
        """Return whether another request could run."""
        return self.batcher.has_room

    def seconds_to_pause(self) -> float:
        """Return how long the next step leaves the machine to other clients."""
        return self.batcher.seconds_to_pause()

    def next_deadline(self) -> float | None:
        """When, on the clock, a step is needed even if nothing happens before."""
        return self._deadlines.next()

    def make_stats(self) -> SchedulerStats:
        """How things stand."""
        running, waiting = self.get_request_counts()
        stats = SchedulerStats(num_running_reqs=running, num_waiting_reqs=waiting)
        stats.kv_cache_usage = self.pool.usage
        stats.num_corrupted_reqs = self.totals.num_corrupted
        stats.prefix_cache_stats = self.prefix_stats
        return stats

    def get_kv_connector(self) -> SchedulerConnector | None:
        """The scheduler's half of the connector."""
        return self._connector

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content, because the weights changed; False while any block is in use."""
        was_reset = self.pool.reset_prefix_cache()
        self.prefix_stats.reset |= was_reset
        return was_reset

    # How a step is decided.

    def _end_overdue(self) -> None:
        for deadline in self._deadlines.take_expired(self._clock()):
            request = self.requests.get(deadline.key)
            if request is None:
                continue
            if deadline.stage is None:
                self.live.finish(request, ended_late(request.status, deadline.seconds))
            elif ending := self.waits.overdue(request, deadline):
                self.live.finish(request, ending)

    def _admit_ready(self) -> None:
        for ready in self.waits.take_ready():
            if ready.ending is not None:
                self.live.finish(ready.request, ready.ending)
            elif ready.request.received is not None:
                self._results.apply_received(ready.request)
            else:
                self.batcher.waiting.add(ready.request)

    def _order(self, plan: StepPlan) -> SchedulerOutput:
        for entry in plan:
            request = entry.request
            if not request.is_known_to_runner:
                request.milestones.scheduled = self._clock()
                if not request.is_fork:
                    self.prefix_stats.record(request.num_prompt_tokens, request.num_cached_tokens)
                    self.totals.num_cached_tokens += request.num_cached_tokens
            if self.sender and request.is_sending:
                self.sender.publish(request, request.num_computed_tokens + entry.num_tokens)
        output = plan.to_output(self.pool)
        self.grammars.mask(plan, output)
        output.block_copies = self._results.forking.take_copies()
        output.finished_req_ids = self.live.take_finished()
        output.kv_connector_metadata = self._connector.build_metadata() if self._connector else None
        self.totals.num_steps += 1
        self.totals.num_preemptions += plan.num_preempted
        self.live.has_news = plan.num_preempted > 0
        return output
