"""The engine: a scheduler that decides, an executor that computes, and the step that joins them."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from contract.errors import KvbatonError, NotFoundError, SettingError, UnsupportedFieldError
from contract.layout import KVLayout, Side
from contract.requests import EngineOutput, EngineRequest
from engine.connector import ConnectorFactory, ConnectorPair, ShowsProgress
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.vocabulary import VocabularyLoader, load_vocabulary
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.ending import RequestStatus
from engine.scheduling.grammars import Grammars
from engine.scheduling.inspection import check_integrity, counters, debug_state
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.waits import WaitStage
from engine.settings import EngineSettings
from engine.stepping.gate import PacedGate, StepGate

if TYPE_CHECKING:
    from engine.executors.executor import Executor

logger = logging.getLogger(__name__)

ExecutorStart = Callable[[EngineSettings], tuple["Executor", int]]
"""settings → an executor with loaded weights and an allocated KV cache, and the number of blocks."""

_Begun = tuple[SchedulerOutput, Callable[[], ModelRunnerOutput]]
"""A step's orders, and what waits for its results."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What others may know of an engine that is up.

    max_model_len: tokens that prompt and answer may have together, here. eos_token_ids: the model's own end tokens.
    layout: of one of ``num_ranks`` ranks. control_address: "host:port" of the connector's control link; empty without a
    connector. has_head: without it there are embeddings only.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    model_fingerprint: str
    layout: KVLayout
    num_blocks: int
    dtype: str
    control_address: str
    num_ranks: int = 1
    has_head: bool = True

    @property
    def side(self) -> Side:
        """How the engine keeps its KV."""
        return Side(self.layout, self.num_ranks)


def start_executor(settings: EngineSettings) -> tuple["Executor", int]:
    """Executor → workers → runner → weights, then the KV cache. Raises SettingError for what cannot be served."""
    # Imported here, so that a process that only talks to an engine never loads torch.
    from engine.executors.executor import create_executor
    from engine.kv_cache.startup import initialize_kv_cache

    executor = create_executor(settings)
    num_blocks, _ = initialize_kv_cache(executor)
    return executor, num_blocks


class EngineCore:
    """Owns executor, connector, the grammars' compiler, scheduler and step gate. Used from one thread.

    load_vocabulary: model folder, its end tokens → what the tokens stand for; called in another thread, if ever.
    gate: decides when a step starts; None: a PacedGate. It asks the core about its work (``engine.stepping.gate.Work``).
    stages: see Scheduler.
    """

    def __init__(
        self,
        settings: EngineSettings,
        connector_factory: ConnectorFactory | None = None,
        *,
        wake: Callable[[], None] = lambda: None,
        start: ExecutorStart = start_executor,
        load_vocabulary: VocabularyLoader = load_vocabulary,
        clock: Callable[[], float] = time.monotonic,
        gate: StepGate | None = None,
        stages: Sequence[WaitStage] = (),
    ) -> None:
        self.executor, num_blocks = start(settings)
        self._has_news = False
        self._under_way: _Begun | None = None
        self._clock = clock
        self._wake = wake
        self._gate = gate or PacedGate(settings.max_hold_share, clock)
        model = self.executor.model_info
        load = partial(load_vocabulary, settings.model, model.eos_token_ids)
        self._grammars = GrammarCompiler(load, model.vocab_size)
        self._connector: ConnectorPair | None = None
        self._take_finished: Callable[[], tuple[set[str], set[str]]] = lambda: (set(), set())
        with ExitStack() as undo:
            undo.callback(self.close)
            self._connect(connector_factory, settings.tensor_parallel_size, self._on_connector_news)
            self.info, self.scheduler = self._schedule_with(settings, num_blocks, wake, stages)
            self.executor.watch(wake)
            undo.pop_all()

    def step(
        self,
        meanwhile: Callable[[], None] = lambda: None,
        may_go_on: Callable[[], bool] = lambda: False,
    ) -> dict[int, list[EngineOutput]]:
        """One step: every running request advances by one token, or by a chunk of its prompt.

        A request whose KV has arrived since the last one is among them. While the model is computed, the next step is
        drafted, and ``meanwhile`` called.

        may_go_on: asked when the tokens are drawn. True: there is no input that waits, and none is given while
        ``is_under_way``. Then the next step begins before the tokens are taken in, if they cannot change it.
        """
        started = self._clock()
        self._has_news = False
        scheduled, finish = self._under_way or self._begin()
        self._under_way = None
        meanwhile()
        self.scheduler.draft_next(scheduled)
        output = finish()
        if output.was_cut_short:
            self._gate.interrupted()
            return self.scheduler.update_from_output(scheduled, output)
        self._gate.ended(is_empty=not scheduled.total_num_scheduled_tokens)
        if may_go_on() and self._gate.may_continue(self) and (following := self.scheduler.go_on(output)):
            self._under_way = self._let_begin(following)
        outputs = self.scheduler.update_from_output(scheduled, output)
        self.scheduler.note_duration(scheduled, self._clock() - started)
        return outputs

    def _begin(self) -> _Begun:
        self.scheduler.on_transfers_finished(*self._take_finished())
        return self._let_begin(self.scheduler.schedule())

    def _let_begin(self, scheduled: SchedulerOutput) -> _Begun:
        self.scheduler.totals.held_seconds += self._gate.started()
        return scheduled, self.executor.begin(scheduled)

    @property
    def is_under_way(self) -> bool:
        """The next step has begun: nothing but ``step`` may be called."""
        return self._under_way is not None

    def seconds_to_start(self) -> float | None:
        """Return how long to delay the next step; None while there is none. Ask again after every message."""
        return self._gate.seconds_to_start(self)

    # What the gate asks.

    def needs_step(self) -> bool:
        """Return False while nothing would change: wait for a message, ``wake`` or ``seconds_to_deadline``."""
        return self._has_news or self.scheduler.needs_step()

    def take_news(self) -> None:
        """Process what the connector has reported: transfers that ended, and those that need blocks."""
        self.scheduler.on_transfers_finished(*self._take_finished())
        self.scheduler.take_news()

    def next_arrival(self) -> float | None:
        """Return when, on the clock, the KV of a request is expected; None where none is."""
        return self._connector.scheduler.next_arrival() if self._connector is not None else None

    def has_answers_only(self) -> bool:
        """Return whether the next step holds answers, and no prompt waits."""
        return self.scheduler.has_answers_only()

    def seconds_to_pause(self) -> float:
        """Return how long the next step leaves the machine to other clients."""
        return self.scheduler.seconds_to_pause()

    # What other threads report.

    def note_news(self) -> None:
        """Make the next step run whatever the scheduler knows: a deadline is due, or the connector has news."""
        self._has_news = True

    def _on_connector_news(self) -> None:
        """Restart a young step for a request that has arrived, and wake the loop. From a thread of the connector."""
        if self._gate.may_interrupt() and self._has_newcomer():
            self.executor.cut_short()
        self._wake()

    def _has_newcomer(self) -> bool:
        connector = self._connector
        return connector is not None and connector.scheduler.has_arrived() and self.scheduler.has_room()

    def progress(self) -> dict[str, int]:
        """Return how far the connector's threads have come; from any thread, without waiting for one."""
        scheduler = None if self._connector is None else self._connector.scheduler
        return scheduler.progress() if isinstance(scheduler, ShowsProgress) else {}

    def seconds_to_deadline(self) -> float | None:
        """How long one may wait before a step is due; None for ever."""
        deadline = self.scheduler.next_deadline()
        return None if deadline is None else max(0.0, deadline - self._clock())

    def add_request(self, request: EngineRequest) -> None:
        """Queue a tokenized request. A bad one is answered with an error output."""
        try:
            request.check(self.info.vocab_size)
            if request.pooling_params is None and not self.info.has_head:
                raise UnsupportedFieldError(
                    "the model has no output head: it gives embeddings only", param="model"
                )
            self.scheduler.add_request(request)
        except KvbatonError as error:
            self.scheduler.reject(request, error)

    def abort(self, keys: list[str]) -> None:
        """End these requests in whatever state they are."""
        self.scheduler.finish_requests(keys, RequestStatus.FINISHED_ABORTED)

    def abort_request(self, request_id: str, attempt: int | None, choice: int | None = None) -> None:
        """End a choice of a request (None: all), of all attempts up to ``attempt``, and take back what they lend."""
        self.scheduler.abort_request(request_id, attempt, choice)

    def call(self, method: str, args: list[Any]) -> Any:
        """A utility by name; the result is plain data. Raises NotFoundError with the right names."""
        utilities: dict[str, Callable[..., Any]] = {
            "stats": self.scheduler.make_stats,
            "debug_state": lambda: debug_state(self.scheduler),
            "counters": lambda: counters(self.scheduler),
            "reset_prefix_cache": self.scheduler.reset_prefix_cache,
            "pid": os.getpid,
            "check_integrity": lambda: check_integrity(self.scheduler),
        }
        if method not in utilities:
            raise NotFoundError(f"no utility is called {method!r}; there are {', '.join(utilities)}")
        return msgspec.to_builtins(utilities[method](*args))

    def shutdown(self) -> dict[int, list[EngineOutput]]:
        """Abort everything, close the connector, end the ranks; returns the last outputs."""
        outputs = self.scheduler.shutdown()
        self.close()
        return outputs

    def close(self) -> None:
        """Close connector and compiler, end the ranks (which close the connector's other half), without the scheduler."""
        if self._connector is not None:
            self._connector.scheduler.close()
        self._grammars.close()
        self.executor.shutdown()

    def _connect(self, factory: ConnectorFactory | None, num_ranks: int, wake: Callable[[], None]) -> None:
        if factory is None:
            return
        side = Side(self.executor.layout, num_ranks)
        self._connector = factory(side, self.executor.model_info.fingerprint, wake)
        self._take_finished = self._connector.ranks.take_finished
        self.executor.set_connector(self._connector.ranks)

    def _schedule_with(
        self,
        settings: EngineSettings,
        num_blocks: int,
        wake: Callable[[], None],
        stages: Sequence[WaitStage],
    ) -> tuple[EngineInfo, Scheduler]:
        model = self.executor.model_info
        connector = self._connector
        pool = BlockPool(
            num_blocks, settings.block_size, enable_prefix_caching=settings.enable_prefix_caching
        )
        info = EngineInfo(
            vocab_size=model.vocab_size,
            max_model_len=_fitting_length(settings, model.max_model_len, pool),
            eos_token_ids=model.eos_token_ids,
            model_fingerprint=model.fingerprint,
            layout=self.executor.layout,
            num_ranks=settings.tensor_parallel_size,
            num_blocks=num_blocks,
            dtype=model.dtype,
            has_head=model.has_head,
            control_address=connector.address if connector is not None else "",
        )
        scheduler = Scheduler(
            settings,
            pool,
            max_model_len=info.max_model_len,
            vocab_size=model.vocab_size,
            model_fingerprint=model.fingerprint,
            connector=connector.scheduler if connector is not None else None,
            grammars=Grammars(
                self._grammars, settings.max_grammar_bytes, settings.grammar_timeout_seconds, wake
            ),
            stages=stages,
            clock=self._clock,
        )
        return info, scheduler


def _fitting_length(settings: EngineSettings, max_model_len: int, pool: BlockPool) -> int:
    """The model's own length, lowered (and said so) to what the pool holds; a length that was set must fit."""
    capacity = pool.num_usable_blocks * pool.block_size
    if max_model_len <= capacity:
        return max_model_len
    needed = f"{max_model_len} tokens need more than the {capacity} that the KV cache holds"
    if settings.max_model_len is not None:
        raise SettingError(
            f"max_model_len: {needed}; lower it or raise kv_cache_bytes", param="max_model_len"
        )
    logger.warning("max_model_len is lowered to %d: %s", capacity, needed)
    return capacity
