"""Decides what each step computes, and what its results mean. Plain integers, no tensors.

A request's way: ``add_request`` lets it wait for its turn, or, when its KV comes from another worker, for that
(``KVReceiver``). ``schedule`` hears what the connector has to say, has the ``Batcher`` share out the step's tokens and
blocks, and orders what prefill legs have to publish (``KVSender``). ``update_from_output`` takes in what was computed:
tokens go out, full blocks become findable, answers end. Before all that a request waits for the grammar that its answer must
match, if any (``Grammars``). Any request can end at any time, by ``finish_requests`` or by its deadline; whatever the
way, it ends in ``_finish``, once.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from contract.errors import ErrorKind, InvalidRequestError, KvbatonError, TransferError
from contract.requests import EngineOutput, EngineRequest, TokenLogprobs
from engine.connector import FirstToken, Received, SchedulerConnector
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.batching import Batcher
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.deadlines import Deadline, Deadlines
from engine.scheduling.ending import HANDED_OVER, Ending, RequestStatus, ended_by_error, ended_late, refused
from engine.scheduling.forking import Forking, choices_of
from engine.scheduling.grammars import Grammars
from engine.scheduling.outbox import Outbox
from engine.scheduling.remote_kv import KVReceiver, KVSender, check_transfer, ending_of, first_tokens_of
from engine.scheduling.request import Request, ended_corrupted, ending_after, why_impossible
from engine.scheduling.roll import Roll
from engine.scheduling.stats import PrefixCacheStats, SchedulerStats, Totals
from engine.scheduling.step_plan import StepPlan
from engine.scheduling.token_logprobs import first_tokens, logprobs_in_row
from engine.settings import EngineSettings


class Scheduler:
    """Owns every unfinished request, and decides about their blocks. Called from one thread.

    max_model_len: tokens that prompt and answer may have together. vocab_size: bounds the token ids that another
    worker may send. clock: seconds, monotonic.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.requests: dict[str, Request] = {}
        self.roll = Roll()
        self._max_length = min(max_model_len, pool.num_usable_blocks * pool.block_size)
        self.batcher = Batcher(pool, settings, self._max_length, clock)
        self.sender = KVSender(connector, pool, self._max_length) if connector is not None else None
        self.receiver = KVReceiver(connector, pool) if connector is not None else None
        self.grammars = grammars or Grammars(None, settings.max_grammar_bytes)
        self.totals = Totals()
        self.prefix_stats = PrefixCacheStats()
        self._settings, self._connector, self._clock = settings, connector, clock
        self._vocab_size, self._model_fingerprint = vocab_size, model_fingerprint
        self._deadlines = Deadlines()
        self._outbox = Outbox(self.totals)
        self.forking = Forking(pool, self.batcher, self.roll, self._outbox)
        self._finished_req_ids: set[str] = set()
        self._has_news = False

    # One step.

    def schedule(self) -> SchedulerOutput:
        """Decide one forward pass. Its result goes to ``update_from_output`` before anything else is called."""
        self._end_overdue()
        self.hear_connector()
        self._hear_grammars()
        return self._give_orders(self.batcher.plan(self.receiver.unserved if self.receiver else None))

    def go_on(self, output: ModelRunnerOutput) -> SchedulerOutput | None:
        """The next step's orders, where neither the results of this one, which come in later, nor news can change them."""
        due, has_moved = self.next_deadline(), output.finished_sending or output.finished_recving
        if has_moved or self._has_any_news() or (due is not None and due <= self._clock()):
            return None
        plan = self.batcher.go_on(output)
        return self._give_orders(plan) if plan else None

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> dict[int, list[EngineOutput]]:
        """Take in a step's results; returns what each client must hear, by client index."""
        self.hear_finished(runner_output.finished_sending or (), runner_output.finished_recving or ())
        computed = {} if runner_output.was_cut_short else scheduler_output.num_scheduled_tokens
        for key, num_tokens in computed.items():
            if running := self.requests.get(key):
                self._advance(running, num_tokens, runner_output)
        return self._outbox.take()

    def hear_finished(self, sent: Collection[str], received: Collection[str]) -> None:
        """Transfers of which the ranks are done: nobody reads ``sent`` any more, and of ``received`` all has arrived."""
        if self.sender and sent:
            self.sender.take_back(sent)
            self._has_news = True
        if self.receiver and received:
            for request, arrived in self.receiver.take_arrived(received):
                if self.grammars.keep(request, arrived):
                    self._await_grammar(request)
                else:
                    self._welcome(request, arrived)

    # Requests come and go.

    def add_request(self, asked: EngineRequest) -> None:
        """Enqueue a request; nothing runs before the next step. One that can never run is answered at once.

        Raises InvalidRequestError for a key or a transfer that is still in use, or a transfer in an engine without a
        connector; and what the connector raises when it refuses to fetch. Then nothing has changed.
        """
        is_lent = self.sender is not None and asked.key in self.sender.leases
        is_here = any(key in self.requests for key in asked.keys)
        if is_here or is_lent or self.pool.is_quarantined(asked.key):
            raise InvalidRequestError(f"request {asked.key} is here already; a replay needs a higher attempt")
        if asked.transfer:
            check_transfer(asked, self.sender, self.roll)
        self.grammars.check(asked)
        now, number = self._clock(), self.totals.num_requests
        request = Request.from_engine_request(
            asked, self._model_fingerprint, self.pool.block_size, now=now, arrival_number=number
        )
        self.totals.num_requests += asked.num_choices
        self._has_news = True
        if reason := why_impossible(request, self._max_length, self.pool.num_usable_blocks):
            self._outbox.tokens(request, [], refused(reason))
            return
        if self.receiver and request.is_receiving:
            self.receiver.start(request)
            seconds = self._settings.remote_kv_timeout_seconds
            self._deadlines.add(Deadline(now + seconds, request.key, seconds, request.status))
            self.grammars.start(request)
        elif self.grammars.start(request):
            self._await_grammar(request)
        else:
            self.batcher.waiting.add(request)
        self._enrol(request)

    def _enrol(self, request: Request) -> None:
        self.requests[request.key] = request
        self.roll.add(request.asked, request.dismissed)
        self._deadlines.add(Deadline(request.expires, request.key, request.asked.deadline_seconds))

    def reject(self, asked: EngineRequest, error: KvbatonError) -> None:
        """Answer a request that was not accepted with its error, among the next step's outputs."""
        self._has_news = True
        self._outbox.refusal(asked, error)

    def finish_requests(self, keys: str | Iterable[str], status: RequestStatus) -> None:
        """End one request or many from outside, in whatever state they are. Unknown keys are ignored."""
        for key in [keys] if isinstance(keys, str) else list(keys):
            if request := self.requests.get(key):
                self._finish(request, Ending(status))

    def abort_request(self, request_id: str, attempt: int | None, choice: int | None = None) -> None:
        """End a choice of a request (None: all), of all attempts up to ``attempt`` (None: of all), and what they still lend.

        A prompt that is computed for several choices goes on for those that are left.
        """
        keys = self.roll.dismiss(request_id, attempt, choice)
        self.finish_requests(keys, RequestStatus.FINISHED_ABORTED)
        if self.sender:
            self.sender.withdraw(request_id, attempt, choice)

    def fail_all(self, kind: ErrorKind, message: str) -> dict[int, list[EngineOutput]]:
        """The engine is broken: an error for every request, without touching blocks or connector any more."""
        for request in self.requests.values():
            self._outbox.tokens(request, [], ended_by_error(kind, message))
        self.requests.clear()
        self.roll.clear()
        return self._outbox.take()

    def shutdown(self) -> dict[int, list[EngineOutput]]:
        """Abort every request; returns what the clients must hear."""
        self.finish_requests(list(self.requests), RequestStatus.FINISHED_ABORTED)
        return self._outbox.take()

    # Questions.

    def get_num_unfinished_requests(self) -> int:
        """How many requests have not ended."""
        return len(self.requests)

    def has_unfinished_requests(self) -> bool:
        """True while a request has not ended."""
        return bool(self.requests)

    def has_finished_requests(self) -> bool:
        """True while the runner has not been told of a request that ended."""
        return bool(self._finished_req_ids)

    def has_requests(self) -> bool:
        """True while a request has not ended, or the runner has not been told."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting); waiting for KV from another worker counts as waiting."""
        return len(self.batcher.running), len(self.requests) - len(self.batcher.running)

    def needs_step(self) -> bool:
        """True when a step could change something; False while all wait for events, for blocks or for deadlines."""
        return bool(self.batcher.running) or self._has_any_news()

    def _has_any_news(self) -> bool:
        has_own = self._has_news or self.grammars.has_news or self._finished_req_ids or self._outbox
        return bool(has_own) or (self._connector is not None and self._connector.has_work())

    def next_deadline(self) -> float | None:
        """When, on the clock, a step is needed even if nothing happens before."""
        return self._deadlines.next()

    def make_stats(self) -> SchedulerStats:
        """How things stand."""
        running, waiting = self.get_request_counts()
        stats = SchedulerStats(num_running_reqs=running, num_waiting_reqs=waiting)
        stats.kv_cache_usage, stats.num_corrupted_reqs = self.pool.usage, self.totals.num_corrupted
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
            if request is None or deadline.waiting not in (None, request.status):
                continue
            is_grammars, seconds = deadline.waiting is RequestStatus.WAITING_FOR_FSM, deadline.seconds
            overdue = self.grammars.overdue(request, seconds) if is_grammars else None
            self._finish(request, overdue or ended_late(request.status, seconds))

    def hear_connector(self) -> None:
        """Transfers that have failed end their requests, those that have begun get blocks."""
        if self.receiver:
            for failure in self.receiver.take_events():
                self._finish(self.requests[failure.request_id], ending_of(failure))
            self.receiver.reserve(self.batcher.num_promised_blocks, self.batcher.waiting.first)

    def _await_grammar(self, request: Request) -> None:
        """It has no blocks, or its KV has arrived in them; the time for this state bounds how long it holds these."""
        request.status = RequestStatus.WAITING_FOR_FSM
        seconds = self._settings.grammar_timeout_seconds
        self._deadlines.add(Deadline(self._clock() + seconds, request.key, seconds, request.status))

    def _hear_grammars(self) -> None:
        for ready in self.grammars.take_ready():
            if ready.ending:
                self._finish(ready.request, ready.ending)
            elif ready.received:
                self._welcome(ready.request, ready.received)
            elif not ready.request.is_receiving:
                self.batcher.waiting.add(ready.request)

    def _give_orders(self, plan: StepPlan) -> SchedulerOutput:
        for turn in plan:
            request = turn.request
            if not request.is_known_to_runner:
                request.milestones.scheduled = self._clock()
                if not request.is_fork:
                    self.prefix_stats.record(request.num_prompt_tokens, request.num_cached_tokens)
                    self.totals.num_cached_tokens += request.num_cached_tokens
            if self.sender and request.is_sending:
                self.sender.publish(request, request.num_computed_tokens + turn.num_tokens)
        output = plan.to_output(self.pool)
        self.grammars.mask(plan, output)
        output.block_copies = self.forking.take_copies()
        output.finished_req_ids, self._finished_req_ids = self._finished_req_ids, set()
        output.kv_connector_metadata = self._connector.build_metadata() if self._connector else None
        self.totals.num_steps += 1
        self.totals.num_preemptions += plan.num_preempted
        self._has_news = plan.num_preempted > 0
        return output

    # What a step has changed.

    def _welcome(self, request: Request, received: Received) -> None:
        """Its KV has arrived and was verified: its full blocks may be found, and it waits for its first step."""
        try:
            tokens = first_tokens_of(received, request.asked.num_choices, self._vocab_size)
        except TransferError as error:
            self._finish(request, ended_by_error(error.kind, error.message))
            return
        choices = choices_of(request)
        for choice, token in zip(choices, tokens, strict=True):
            choice.receive(received, token, self._clock())
        self.totals.num_received_tokens += request.num_prompt_tokens - request.num_cached_tokens
        self.batcher.index_computed(request)
        self._has_news = True
        endings = [self._ending_after(one, one.answer_length - 1) for one in choices]
        if ending := self._part(choices, endings):
            self._finish(request, ending)
        else:
            self.batcher.arrived.add(request)

    def _advance(self, request: Request, num_tokens: int, output: ModelRunnerOutput) -> None:
        row = output.req_id_to_index[request.key]
        sampled = output.sampled_token_ids[row]
        pooled = output.pooler_output[row] if output.pooler_output else None
        is_corrupt = (output.num_nans_in_logits or {}).get(request.key, 0) > 0
        if is_corrupt or (not sampled and not pooled and num_tokens == request.num_missing_tokens):
            self._end_corrupted(request, is_corrupt)
            return
        num_prompt_left = request.num_prompt_tokens - request.num_computed_tokens
        if num_prompt_left > 0:
            self.totals.num_prefill_tokens += min(num_tokens, num_prompt_left)
        if 0 < num_prompt_left <= num_tokens:
            request.milestones.prefilled = self._clock()
        request.num_computed_tokens += num_tokens
        self.batcher.index_computed(request)
        request.take_prompt_logprobs(output.prompt_logprobs_dict.get(request.key))
        if pooled:
            self._finish(request, Ending(RequestStatus.FINISHED_STOPPED), pooled=pooled)
        if not sampled:
            return
        alternatives = request.asked.sampling.logprobs
        if request.is_sending or request.asked.num_choices > 1:
            self._take_first_tokens(request, first_tokens(output, request.key, sampled[0], alternatives))
        else:
            request.append_token(sampled[0])
            ending = self._ending_after(request, request.answer_length)
            self._say(request, sampled[0], logprobs_in_row(output.logprobs, row, alternatives), ending)

    def _take_first_tokens(self, request: Request, drawn: list[FirstToken]) -> None:
        """Token 0 of each choice of a prompt: they go on at another worker, or part here."""
        choices = choices_of(request)
        for choice, token in zip(choices, drawn, strict=True):
            choice.append_token(token.token_id)
        endings = [self._ending_after(one, one.answer_length) for one in choices]
        if self.sender and request.is_sending and None in endings:
            self.sender.finish(request, drawn)
            endings = [ending or HANDED_OVER for ending in endings]
        ending, logprobs = self._part(choices, endings, drawn), drawn[0].logprobs
        self._say(request, drawn[0].token_id, [logprobs] if logprobs else None, ending)

    def _part(
        self, choices: list[Request], endings: list[Ending | None], drawn: Sequence[FirstToken] = ()
    ) -> Ending | None:
        ending, forks = self.forking.part(choices, endings, drawn)
        for fork in forks:
            self._enrol(fork)
        return ending

    def _say(
        self, request: Request, token: int, logprobs: list[TokenLogprobs] | None, ending: Ending | None
    ) -> None:
        if ending is None:
            self._outbox.tokens(request, [token], None, logprobs)
        else:
            self._finish(request, ending, [token], logprobs)

    def _ending_after(self, request: Request, index: int) -> Ending | None:
        """Whether the newest token, number ``index`` of the answer, ends it; if not, its grammar follows."""
        return ending_after(request, index, self._max_length) or self.grammars.follow(request)

    def _end_corrupted(self, request: Request, has_nans: bool) -> None:
        """What it computed is NaN, or nothing where there should be something: nobody may reuse its KV."""
        self.pool.forget_content(request.key)
        self.totals.num_corrupted += 1
        self._finish(request, ended_corrupted(request, has_nans))

    def _finish(
        self,
        request: Request,
        ending: Ending,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        pooled: list[float] | None = None,
    ) -> None:
        """Let go of what it holds, in whatever state it is, and tell its client and the runner."""
        if self.receiver and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self.receiver.give_up(request)
        elif self.sender and self.sender.has_opened(request):
            self.sender.abandon(request, ending)
        else:
            self.pool.free(request.key)
        self.batcher.remove(request)
        self.grammars.give_up(request)
        del self.requests[request.key]
        self.roll.discard(request.key)
        self._deadlines.forget(request.key)
        if request.is_known_to_runner:
            self._finished_req_ids.add(request.key)
        self._outbox.tokens(request, token_ids or [], ending, logprobs, pooled)
        self._has_news = True
