"""The engine: a scheduler that decides, an executor that computes, and the step that joins them."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from contract.decoding import converter
from contract.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    KvbatonError,
    NotFoundError,
    UnsupportedFieldError,
)
from contract.outputs import EngineOutput
from contract.requests import EngineRequest, HandOff
from engine.connecting import EngineConnector, Transfers, connect
from engine.grammar.building import VocabularyLoader, load_vocabulary
from engine.grammar.compiler import GrammarCompiler
from engine.info import EngineInfo
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.interface import SchedulerInterface
from engine.scheduling.requests.finish import RequestStatus
from engine.scheduling.waits.grammars import Grammars
from engine.scheduling.waits.waits import WaitStage
from engine.settings import EngineSettings
from engine.startup import (
    ExecutorStart,
    SchedulerFactory,
    create_scheduler,
    describe_engine,
    log_start,
    start_executor,
)
from engine.stepping.gate import PacedGate, StepGate, Work

if TYPE_CHECKING:
    from engine.executor import Executor

logger = logging.getLogger(__name__)

StartedStep = tuple[SchedulerOutput, Callable[[], ModelRunnerOutput]]
"""A step's order, and what waits for its results."""
_hand_off = converter(HandOff)


class StepStarter:
    """Starts the scheduler's steps on the executor, each with the gate's permission.

    The caller of ``next`` has asked ``StepGate.seconds_to_start``. early_step: the step that has started early, if one has.
    """

    def __init__(
        self, scheduler: SchedulerInterface, executor: "Executor", connector: EngineConnector, gate: StepGate
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._connector = connector
        self._gate = gate
        self.early_step: StartedStep | None = None
        # The time by which steps were delayed, or restarted, so that requests could join them.
        self._held_seconds = 0.0
        # Empty forward passes for the other ranks of a data-parallel group.
        self._num_dummy_steps = 0

    def next(self) -> StartedStep:
        """Return the step that has started already, or start one."""
        if (started := self.early_step) is not None:
            self.early_step = None
            return started
        # Twice, because processing the events may start reads that end at once: blocks of a peer on this machine are there
        # before the next step is planned, and a request that waits for them joins this step instead of the one after it.
        self._scheduler.on_transfers_finished(*self._connector.get_finished())
        if self._connector.has_work():
            self._scheduler.process_events()
            if self._connector.has_arrived():  # read from a peer's memory as soon as it had blocks
                self._scheduler.on_transfers_finished(*self._connector.get_finished())
        return self._start(self._scheduler.schedule())

    def run_ahead(self, scheduled: SchedulerOutput, work: Work, may_start: Callable[[], bool]) -> None:
        """Start the step after ``scheduled``, which is being computed, if it may run ahead and no request will join it."""
        if not self._executor.runs_ahead or not may_start() or not self._gate.may_run_ahead(work):
            return
        if following := self._scheduler.schedule_ahead(scheduled):
            self.early_step = following, self._executor.begin(following)

    def on_step_end(self, output: ModelRunnerOutput, work: Work, may_start: Callable[[], bool]) -> None:
        """Start the next step before ``output``, the results of this one, are processed, if they cannot change it."""
        if self.early_step is not None:
            # The device computes it from now on.
            self._held_seconds += self._gate.on_start(is_empty=False)
        elif may_start() and self._gate.may_continue(work):
            following = self._scheduler.schedule_early(output)
            self.early_step = self._start(following) if following else None

    def counters(self) -> dict[str, float]:
        """Return counters since the start, with the names of ``serving.metric_names.WORKER_METRICS``."""
        return {
            "dummy_steps_total": self._num_dummy_steps,
            "step_held_seconds_total": self._held_seconds,
            **self._gate.counters(),
        }

    def _start(self, scheduled: SchedulerOutput) -> StartedStep:
        is_empty = not scheduled.total_num_scheduled_tokens
        is_dummy = is_empty and self._gate.must_compute()
        self._held_seconds += self._gate.on_start(is_empty=is_empty and not is_dummy)
        finish = self._executor.begin(scheduled)
        return scheduled, partial(self._finish_dummy, finish) if is_dummy else finish

    def _finish_dummy(self, finish: Callable[[], ModelRunnerOutput]) -> ModelRunnerOutput:
        """End a step without tokens by an empty forward pass, for the other engines that this one steps with."""
        output = finish()
        self._executor.collective_rpc("execute_dummy_batch")
        self._num_dummy_steps += 1
        return output


class EngineCore:
    """Owns executor, connector, grammar compiler, scheduler and step gate. Used from one thread.

    wake: wakes the step loop, from any thread. load_vocabulary: model folder and end tokens → the text of each token;
    called in another thread when the first grammar comes. gate: decides when a step starts; None: a PacedGate. The core
    answers its questions (``engine.stepping.gate.Work``). transfers: None in an engine that lends and fetches no KV. stages:
    see SchedulerState.
    """

    def __init__(
        self,
        settings: EngineSettings,
        transfers: Transfers | None = None,
        *,
        wake: Callable[[], None] = lambda: None,
        start: ExecutorStart = start_executor,
        load_vocabulary: VocabularyLoader = load_vocabulary,
        clock: Callable[[], float] = time.monotonic,
        gate: StepGate | None = None,
        stages: Sequence[WaitStage] = (),
        make_scheduler: SchedulerFactory = create_scheduler,
    ) -> None:
        self._clock = clock
        self._wake = wake
        self.gate = gate or PacedGate(settings.max_hold_share, clock)
        self._is_step_requested = False
        # Closed in the opposite order, also if a later one fails to start: the connector before the memory that it reads.
        with log_start(clock), ExitStack() as resources:
            resources.callback(self.gate.close)
            self.executor, num_blocks = start(settings := self.gate.complete_settings(settings))
            resources.callback(self.executor.shutdown)
            model = self.executor.model_info
            compiler = GrammarCompiler(
                partial(load_vocabulary, settings.model, model.eos_token_ids), model.vocab_size
            )
            resources.callback(compiler.close)
            grammars = Grammars(compiler, settings.max_grammar_bytes, settings.grammar_timeout_seconds, wake)
            self._connector = connect(self.executor, transfers, settings, self._on_connector_event, wake)
            resources.callback(self._connector.close)
            self.info = describe_engine(settings, self.executor, num_blocks, self._connector.address)
            self.scheduler = make_scheduler(settings, self.info, self._connector, grammars, stages, clock)
            self._starter = StepStarter(self.scheduler, self.executor, self._connector, self.gate)
            self.executor.watch(wake)
            self._resources = resources.pop_all()

    # One step.

    def step(
        self,
        meanwhile: Callable[[], None] = lambda: None,
        may_start_early: Callable[[], bool] = lambda: False,
    ) -> dict[int, list[EngineOutput]]:
        """Advance every running request by one token, or by a chunk of its prompt; return outputs by client index.

        While the model computes, ``meanwhile`` is called and the next step is prepared.

        may_start_early: True means that no input waits, and that none is given while ``step_in_flight``. Then the next step
        may start before the results of this one are processed: on an executor that runs ahead while this one is computed,
        with every request that may continue, and else when its tokens are sampled, if they cannot change it.
        """
        started_at = self._clock()
        self._is_step_requested = False
        scheduled, finish = self._starter.next()
        # While the device computes: the outputs of the last step are sent, and the next step is prepared.
        meanwhile()
        self.scheduler.prepare_next(scheduled)
        self._starter.run_ahead(scheduled, self, may_start_early)
        output = finish()
        if output.was_interrupted:
            self.gate.on_interrupt()
            return self.scheduler.update_from_output(scheduled, output)
        self.gate.on_end(is_empty=not scheduled.total_num_scheduled_tokens)
        # Before the results are applied, so that the device does not wait for that.
        self._starter.on_step_end(output, self, may_start_early)
        outputs = self.scheduler.update_from_output(scheduled, output)
        self.scheduler.note_duration(scheduled, self._clock() - started_at)
        return outputs

    @property
    def step_in_flight(self) -> bool:
        """True while the next step has started already: nothing but ``step`` may be called."""
        return self._starter.early_step is not None

    # When the next step starts.

    def seconds_to_start(self) -> float | None:
        """Return how long to delay the next step; None while there is none. Call again after every message."""
        return self.gate.seconds_to_start(self)

    def seconds_to_deadline(self) -> float | None:
        """Return the seconds until a deadline is due, and with it a step; None if there is none."""
        deadline = self.scheduler.next_deadline()
        return None if deadline is None else max(0.0, deadline - self._clock())

    def request_step(self) -> None:
        """Make the next step run even if the scheduler sees no work: a deadline is due, or the connector has events."""
        self._is_step_requested = True

    def needs_step(self) -> bool:
        """Return False while nothing would change before a message, ``wake`` or ``seconds_to_deadline``."""
        return self._is_step_requested or self.scheduler.needs_step()

    def process_events(self) -> None:
        """Process what the connector has reported: transfers that ended, and those that need blocks."""
        self.scheduler.on_transfers_finished(*self._connector.get_finished())
        self.scheduler.process_events()

    def next_arrival(self) -> float | None:
        """Return when, on the clock, the KV of a request is expected; None if unknown."""
        return self._connector.next_arrival()

    def is_decode_only(self) -> bool:
        """Return whether the next step holds answers, and no prompt waits."""
        return self.scheduler.is_decode_only()

    def seconds_to_pause(self) -> float:
        """Return how long the next step leaves the machine to other clients."""
        return self.scheduler.seconds_to_pause()

    def _on_connector_event(self) -> None:
        """Restart a young step for a request that has arrived, and wake the loop. From a thread of the connector."""
        # Only if it can join the step that is restarted: otherwise the answers in it are delayed for nothing.
        if self.gate.may_interrupt() and self._connector.has_arrived() and self.scheduler.has_room():
            self.executor.interrupt()
        self._wake()

    # Requests and calls.

    def expect_request(self, request: EngineRequest) -> None:
        """Ask for the KV of a request before ``add_request``, from any thread. Ignores a bad one, which that answers."""
        with suppress(KvbatonError):
            _check(request, self.info)
            self._connector.expect(request)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a tokenized request. A bad one is answered with an error output."""
        try:
            _check(request, self.info)
            self.scheduler.add_request(request)
        except KvbatonError as error:
            self.scheduler.reject(request, error)
        self._connector.drop_expected(request)  # ends what ``expect_request`` began for one that was rejected

    def abort(self, keys: list[str]) -> None:
        """Abort these requests, whatever their status."""
        self.scheduler.finish_requests(keys, RequestStatus.FINISHED_ABORTED)

    def hand_off(self, order: HandOff, expires: float) -> None:
        """Lend the KV of a request that decodes to the worker that continues it; see ``SchedulerInterface``.

        expires: when, on the monotonic clock of this machine, it is too late. Raises DeadlineError then.
        """
        _check_in_time(order, self._clock() - expires)
        self.scheduler.hand_off(order)

    def prepare(self, request: EngineRequest, then: Callable[[], None]) -> None:
        """Compile the grammar of a request that may come, and connect to the worker that it comes from.

        ``then`` is called in any thread when that is over, before ``wake``. Raises the error with which the request would be
        rejected; then nothing follows.
        """
        _check(request, self.info)
        end = partial(_in_turn, then, self._wake)
        # One after the other, and the grammar first: its errors are raised here, before a connection is made.
        self.scheduler.prepare(request, partial(self._connector.connect, request, end))

    def flush_urgent(self) -> dict[int, list[EngineOutput]]:
        """Return the outputs until now, by client index, if one of them is to be sent before the next step."""
        return self.scheduler.flush_urgent()

    def call(self, method: str, args: list[Any]) -> Any:
        """Call a utility by name; return its result as plain data. Raises NotFoundError that lists the names."""
        utilities: dict[str, Callable[..., Any]] = {
            "stats": self.scheduler.make_stats,
            "debug_state": self.scheduler.debug_state,
            "counters": lambda: self.scheduler.counters() | self._starter.counters(),
            "reset_prefix_cache": self.scheduler.reset_prefix_cache,
            "check_reload": partial(self.executor.collective_rpc, "check_reload"),
            "reload_weights": partial(reload_weights, self),
            "pid": os.getpid,
            "check_integrity": self.scheduler.check_integrity,
            "hand_off": lambda order, expires: self.hand_off(_hand_off(order), expires),
        }
        if method not in utilities:
            raise NotFoundError(f"no utility is called {method!r}; there are {', '.join(utilities)}")
        return msgspec.to_builtins(utilities[method](*args))

    def progress(self) -> dict[str, int]:
        """Return how far the connector's threads have come; from any thread, without waiting for one."""
        return self._connector.progress()

    def shutdown(self) -> dict[int, list[EngineOutput]]:
        """Abort everything and ``close``; return the last outputs."""
        outputs = self.scheduler.shutdown()
        self.close()
        return outputs

    def close(self) -> None:
        """Close connector and compiler, and end the ranks (which close the connector's other half). May be called twice."""
        self._resources.close()


def reload_weights(core: EngineCore) -> str:
    """Read the model's weights again, and drop the prefix cache that the former ones have filled; return the fingerprint.

    Raises InvalidRequestError while a request is live or KV is lent, SettingError if the folder has another model now.
    Nothing has changed then but the cache. Raises InternalError if the weights could not be loaded; the former ones are gone
    then, and the engine cannot compute.
    """
    # Those that wait count as well: they hold no blocks, but their hashes begin with the former fingerprint.
    if core.scheduler.has_unfinished_requests():
        raise InvalidRequestError("requests that have not finished use the weights; reload them afterwards")
    core.executor.collective_rpc("check_reload")
    connector = core.scheduler.get_kv_connector()
    # Before the load, since a peer may read what is lent until then.
    if connector is not None and not core.scheduler.reset_prefix_cache():
        raise InvalidRequestError(
            "transfers hold blocks that the former weights have filled; reload afterwards"
        )
    try:
        core.executor.collective_rpc("reload_weights")
    except KvbatonError as error:
        raise InternalError(
            f"the weights could not be reloaded, and the former ones are freed: {error.message}"
        ) from error
    fingerprint = core.executor.model_info.fingerprint
    core.info = structs.replace(core.info, model_fingerprint=fingerprint)
    core.scheduler.reset_prefix_cache(fingerprint)
    if connector is not None:
        connector.set_model_fingerprint(fingerprint)
    logger.info("weights were reloaded: the model's fingerprint is %s", fingerprint)
    return fingerprint


def _check(request: EngineRequest, info: EngineInfo) -> None:
    """Raise InvalidRequestError or UnsupportedFieldError for a request that this engine cannot serve."""
    request.check(info.vocab_size)
    if request.pooling_params is None and not info.has_head:
        raise UnsupportedFieldError("the model has no output head: it gives embeddings only", param="model")


def _check_in_time(order: HandOff, seconds_late: float) -> None:
    """Raise DeadlineError for an order that came too late."""
    # It has waited for the end of a step, and its sender may have gone on without it.
    if seconds_late > 0:
        raise DeadlineError(
            f"request {order.key} is not handed off: the order came {seconds_late:.3f} s too late"
        )


def _in_turn(*calls: Callable[[], None]) -> None:
    for call in calls:
        call()
