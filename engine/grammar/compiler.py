"""Compiles grammars beside the step thread, each one once.

A compilation cannot be stopped, but it ends: the library counts what it builds, and the length of the text is bounded. One
that no request waits for any more is not started.
"""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from llguidance import LLTokenizer

from contract.errors import InternalError, KvbatonError
from contract.requests import EngineRequest
from contract.sampling import MAX_GRAMMAR_BYTES, Grammar
from engine.grammar.building import HeapTrimmer, MachineBuilder
from engine.grammar.machine import (
    MAX_CACHED,
    MAX_CACHED_BYTES,
    MAX_ENTRY_BYTES,
    MAX_LIVE_BYTES,
    Compiled,
    CompiledGrammars,
    LiveMachines,
    Machine,
)
from engine.grammar.matcher import GrammarMatcher
from engine.grammar.threads import JobThreads

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
Outcome = GrammarMatcher | KvbatonError
_MAX_ERROR_LENGTH = 1_000
_STACK_BYTES = MAX_GRAMMAR_BYTES * 2**11
_MANY_CORES = 4


@dataclass
class _InFlight:
    """A compilation that has not ended. num_waiting: requests that need it."""

    compiled: Compiled
    num_waiting: int = 0


class GrammarCompiler:
    """Owns the threads, and the compiled grammars that were used last.

    load_vocabulary: called at first use, in one of the threads. vocab_size: see MachineBuilder. The public methods are
    called from one thread.
    """

    def __init__(
        self,
        load_vocabulary: Callable[[], LLTokenizer],
        vocab_size: int,
        *,
        max_cached_bytes: int = MAX_CACHED_BYTES,
        max_live_bytes: int = MAX_LIVE_BYTES,
    ) -> None:
        trimmer = HeapTrimmer()
        self._live = LiveMachines(max_live_bytes)
        self._builder = MachineBuilder(load_vocabulary, vocab_size, self._live, trimmer)
        self._lock = threading.Lock()  # for the two tables below
        self._in_flight: dict[Grammar, _InFlight] = {}
        self._compiled = CompiledGrammars(MAX_CACHED, max_cached_bytes, MAX_ENTRY_BYTES)
        # One at a time where a second would take a core from the steps of running answers.
        num_at_once = 2 if (os.cpu_count() or 1) >= _MANY_CORES else 1
        self._threads = JobThreads(_STACK_BYTES, num_running=num_at_once, after_job=trimmer.trim)

    @property
    def num_cached_bytes(self) -> int:
        """The estimated bytes of the compiled grammars that are kept for other requests."""
        return self._compiled.num_bytes

    def start(
        self, engine_request: EngineRequest, grammar: Grammar, then: Callable[[Outcome], None]
    ) -> Compiled:
        """Prepare a matcher behind the tokens that were delivered; ``then`` gets it (or the error), in another thread.

        An answer that goes on here is begun before those that wait, and without their niceness, if the grammar was used
        before: its client waits for the next token, and it takes no longer than the mask of a step.

        Returns the grammar's compilation; ``running()`` is True once it has started. Raises OverloadedError while
        other grammars take all the memory that grammars may have.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            wait = None if compiled else self._in_flight.get(grammar)
            is_new = compiled is None and wait is None
            if is_new:
                self._live.check_room()
            if compiled is None:
                wait = wait or self._in_flight.setdefault(grammar, _InFlight(Future()))
                wait.num_waiting += 1
                compiled = wait.compiled
        # Outside the lock: for a grammar that is compiled already, the callback runs here and now.
        compiled.add_done_callback(lambda done: self._submit_beginning(engine_request, done, then))
        if is_new:
            self._threads.submit(
                partial(self._compile, grammar, compiled), partial(self._finish, grammar, compiled)
            )
        return compiled

    def give_up(self, grammar: Grammar, compiled: Compiled) -> None:
        """Stop the wait of a request. A compilation without any, which has not started, is dropped."""
        with self._lock:
            wait = self._in_flight.get(grammar)
            if wait is None or wait.compiled is not compiled:
                return
            wait.num_waiting -= 1
            # One that runs cannot be stopped: its result is kept for others.
            if wait.num_waiting or compiled.running():
                return
            del self._in_flight[grammar]
        compiled.cancel()

    def close(self) -> None:
        """Start no further job."""
        self._threads.close()

    def _submit_beginning(
        self, engine_request: EngineRequest, compiled: Compiled, then: Callable[[Outcome], None]
    ) -> None:
        if compiled.cancelled():
            return
        found = compiled.result()
        is_urgent = engine_request.num_delivered_tokens > 0 and isinstance(found, Machine) and found.has_begun
        self._threads.submit(partial(self._begin, engine_request, compiled, then), then, is_urgent=is_urgent)

    def _compile(self, grammar: Grammar, compiled: Compiled) -> None:
        if compiled.set_running_or_notify_cancel():
            self._finish(grammar, compiled, _caught(lambda: self._builder.build(grammar)))

    def _finish(self, grammar: Grammar, compiled: Compiled, found: Machine | KvbatonError) -> None:
        compiled.set_result(found)
        with self._lock:
            self._in_flight.pop(grammar, None)
            if isinstance(found, Machine):
                self._live.add(found)
            # A failure of the library or of a thread may not come again; what a grammar does wrong is remembered.
            if not isinstance(found, InternalError):
                self._compiled.put(grammar, compiled)

    def _begin(
        self, engine_request: EngineRequest, compiled: Compiled, then: Callable[[Outcome], None]
    ) -> None:
        found = compiled.result()
        if not isinstance(found, Machine):
            then(found)
            return
        outcome = _caught(lambda: self._builder.begin(engine_request, found))
        with self._lock:  # the first masks have grown the machine, or it has failed
            self._compiled.drop_spent()
        then(outcome)


def _caught(work: Callable[[], _T]) -> _T | KvbatonError:
    """Return what ``work`` returns, or the error that it raises, bare: the boundary of the compiling threads."""
    try:
        return work()
    except KvbatonError as error:
        # Its frames would keep alive what the library has built.
        error.__cause__ = error.__context__ = error.__traceback__ = None
        return error
    except BaseException as error:  # noqa: BLE001 - the boundary of the thread; the library's panics are no Exceptions
        logger.error("the grammar library failed with %s", type(error).__name__)
        return InternalError(f"the grammar library failed: {error!r}"[:_MAX_ERROR_LENGTH])
