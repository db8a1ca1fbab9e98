"""Compiles grammars beside the step thread, each one once.

A compilation cannot be stopped, but it ends: the library counts what it builds, and the text's length is bounded. One that
nobody waits for any more is not begun.
"""

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet

import msgspec
from llguidance import LLMatcher, LLTokenizer

from contract.errors import InternalError, InvalidRequestError, KvbatonError, OverloadedError
from contract.json_schema import plain_schema
from contract.requests import EngineRequest
from contract.sampling import MAX_GRAMMAR_BYTES, Grammar
from engine.grammar.cache import Compiled, CompiledGrammars
from engine.grammar.gbnf import gbnf_to_lark
from engine.grammar.json_schema import with_closed_objects
from engine.grammar.lark import with_plain_schemas
from engine.grammar.limits import (
    GRAMMAR_LIMITS,
    HEAVY_BYTES,
    MAX_CACHED,
    MAX_CACHED_BYTES,
    MAX_ENTRY_BYTES,
    MAX_HEAVY_BYTES,
    MAX_LIVE_BYTES,
)
from engine.grammar.machine import Machine
from engine.grammar.matcher import GrammarMatcher, reason_of
from engine.grammar.memory import HeapTrimmer, heap_meter
from engine.grammar.threads import JobThreads

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
Outcome = GrammarMatcher | KvbatonError
_JSON: "JsonCompileOptions" = {"whitespace_pattern": r" |\r?\n[ \t]{0,32}"}
"""A space, or a new line and what indents it: else a model that has never written JSON goes on with spaces for ever."""
_OUR_WORDS = {
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "oneOf can be held only where no value matches two of its branches, as their types, constants or required "
        "properties show; write anyOf"
    )
}
_GBNF_RULE = re.compile(r"^[ \t]*+[\w-]++[ \t]*+::=", re.MULTILINE)
_MAX_ERROR_LENGTH = 1_000
_STACK_BYTES = MAX_GRAMMAR_BYTES * 2**11
_MANY_CORES = 4


@dataclass
class _InFlight:
    """A compilation that has not ended. num_waiting: requests that need it."""

    compiled: Compiled
    num_waiting: int = 0


@dataclass
class _Growth:
    """By how many bytes the heap has grown."""

    num_bytes: int = 0


class GrammarCompiler:
    """Owns the threads, the vocabulary (loaded at first use) and the compiled grammars (the last ones used).

    vocab_size: the model's; ids beyond the tokenizer's are never allowed. The public methods are called from one thread.
    """

    def __init__(
        self,
        load_vocabulary: Callable[[], LLTokenizer],
        vocab_size: int,
        *,
        max_cached_bytes: int = MAX_CACHED_BYTES,
        max_live_bytes: int = MAX_LIVE_BYTES,
    ) -> None:
        self._load_vocabulary = load_vocabulary
        self._loaded: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._vocab_size = vocab_size
        self._max_live_bytes = max_live_bytes
        self._measure = heap_meter()
        self._trimmer = HeapTrimmer()
        self._lock = threading.Lock()  # holds for the three tables below
        self._in_flight: dict[Grammar, _InFlight] = {}
        self._compiled = CompiledGrammars(MAX_CACHED, max_cached_bytes, MAX_ENTRY_BYTES)
        self._live: WeakSet[Machine] = WeakSet()
        self._threads = JobThreads(_STACK_BYTES, num_running=_num_at_once(), after_job=self._trimmer.trim)

    @property
    def num_cached_bytes(self) -> int:
        """What the compiled grammars count for that are kept for other requests."""
        return self._compiled.num_bytes

    def start(self, asked: EngineRequest, grammar: Grammar, then: Callable[[Outcome], None]) -> Compiled:
        """Prepare a matcher behind the tokens that were delivered; ``then`` gets it (or the error), in another thread.

        Returns the grammar's compilation; ``running()`` tells whether its turn has come. Raises OverloadedError while
        other grammars have all the memory that grammars may have.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            wait = None if compiled else self._in_flight.get(grammar)
            is_new = compiled is None and wait is None
            if is_new:
                self._check_live_bytes()
            if compiled is None:
                wait = wait or self._in_flight.setdefault(grammar, _InFlight(Future()))
                wait.num_waiting += 1
                compiled = wait.compiled
        compiled.add_done_callback(lambda done: self._submit_beginning(asked, done, then))
        if is_new:
            self._submit_compilation(grammar, compiled)
        return compiled

    def give_up(self, grammar: Grammar, compiled: Compiled) -> None:
        """A request does not wait any more. A compilation that nobody waits for and that has not begun is dropped."""
        with self._lock:
            wait = self._in_flight.get(grammar)
            if wait is None or wait.compiled is not compiled:
                return
            wait.num_waiting -= 1
            if wait.num_waiting or compiled.running():
                return
            del self._in_flight[grammar]
        compiled.cancel()

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.close()

    def _check_live_bytes(self) -> None:
        num_bytes = sum(machine.num_bytes for machine in self._live)
        if num_bytes > self._max_live_bytes:
            raise OverloadedError(
                f"the grammars of running requests take {num_bytes} bytes, of {self._max_live_bytes}: try again"
            )

    def _submit_compilation(self, grammar: Grammar, compiled: Compiled) -> None:
        try:
            self._threads.submit(partial(self._compile, grammar, compiled))
        except InternalError as error:
            self._finish(grammar, compiled, error)

    def _submit_beginning(
        self, asked: EngineRequest, compiled: Compiled, then: Callable[[Outcome], None]
    ) -> None:
        if compiled.cancelled():
            return
        try:
            self._threads.submit(lambda: self._begin(asked, compiled, then))
        except InternalError as error:
            then(error)

    def _compile(self, grammar: Grammar, compiled: Compiled) -> None:
        if compiled.set_running_or_notify_cancel():
            self._finish(grammar, compiled, _caught(lambda: self._built(grammar)))

    def _built(self, grammar: Grammar) -> Machine:
        vocabulary = self._vocabulary()
        with self._measured() as growth:
            machine = _machine(grammar, vocabulary)
        return Machine(machine, growth.num_bytes)

    def _finish(self, grammar: Grammar, compiled: Compiled, found: Machine | KvbatonError) -> None:
        compiled.set_result(found)
        with self._lock:
            self._in_flight.pop(grammar, None)
            if isinstance(found, Machine):
                self._live.add(found)
            if not isinstance(found, InternalError):
                self._compiled.put(grammar, compiled)

    def _begin(self, asked: EngineRequest, compiled: Compiled, then: Callable[[Outcome], None]) -> None:
        found = compiled.result()
        if not isinstance(found, Machine):
            then(found)
            return
        outcome = _caught(lambda: self._matcher(asked, found))
        with self._lock:  # the first masks have grown the machine, or it has failed
            self._compiled.drop_spent()
        then(outcome)

    def _matcher(self, asked: EngineRequest, machine: Machine) -> GrammarMatcher:
        ends = self._vocabulary().eos_tokens
        num_before = len(asked.prompt_token_ids) - asked.num_delivered_tokens
        before = machine.num_bytes
        with self._measured() as growth:
            matcher = GrammarMatcher(machine, ends, asked, self._vocab_size)
            matcher.advance(asked.prompt_token_ids[num_before:])
        machine.begin(before, growth.num_bytes)
        if machine.num_built_bytes >= HEAVY_BYTES:
            self._check_heavy(machine)
        return matcher

    def _check_heavy(self, machine: Machine) -> None:
        """Raise OverloadedError where other large grammars are in use: a client may send many at once."""
        with self._lock:
            others = [one for one in self._live if one is not machine and len(one.users)]
        num_bytes = sum(one.num_built_bytes for one in others if one.num_built_bytes >= HEAVY_BYTES)
        if num_bytes + machine.num_built_bytes > MAX_HEAVY_BYTES:
            raise OverloadedError(
                f"the grammar takes {machine.num_built_bytes} bytes, and other large ones of running requests "
                f"{num_bytes}, of {MAX_HEAVY_BYTES} together: try again, or make it simpler"
            )

    @contextmanager
    def _measured(self) -> Iterator[_Growth]:
        """Measure what the block adds to the heap, also where it fails. Other threads' work counts as well."""
        growth = _Growth()
        before = self._measure()
        try:
            yield growth
        finally:
            growth.num_bytes = max(0, self._measure() - before)
            self._trimmer.note(growth.num_bytes)

    def _vocabulary(self) -> LLTokenizer:
        with self._loading:
            if self._loaded is None:
                self._loaded = self._load_vocabulary()
            return self._loaded


def _num_at_once() -> int:
    """Return how many jobs run at a time: one where few cores are left for the steps of running answers."""
    return 2 if (os.cpu_count() or 1) >= _MANY_CORES else 1


def _caught(work: Callable[[], _T]) -> _T | KvbatonError:
    """Return what ``work`` returns, or the error that it raises: the boundary of the compiling threads.

    The error comes without its traceback, whose frames would keep alive what the library has built.
    """
    try:
        return work()
    except KvbatonError as error:
        return _bare(error)
    except BaseException as error:  # noqa: BLE001 - the boundary of the thread; the library's panics are no Exceptions
        logger.error("the grammar library failed with %s", type(error).__name__)
        return InternalError(f"the grammar library failed: {error!r}"[:_MAX_ERROR_LENGTH])


def _bare(error: KvbatonError) -> KvbatonError:
    error.__cause__ = error.__context__ = error.__traceback__ = None
    return error


def _machine(grammar: Grammar, vocabulary: LLTokenizer) -> LLMatcher:
    """The grammar's matcher at its start. Raises InvalidRequestError with the library's words."""
    try:
        machine = LLMatcher(vocabulary, _library_form(grammar), log_level=0, limits=GRAMMAR_LIMITS)
    except ValueError as error:
        raise _not_compiled(grammar, str(error)) from error
    if machine.is_error():
        raise _not_compiled(grammar, reason_of(machine))
    return machine


def _not_compiled(grammar: Grammar, reason: str) -> InvalidRequestError:
    reason = _OUR_WORDS.get(reason, reason)
    return InvalidRequestError(f"the {grammar.kind} does not compile: {reason}", param="grammar")


def _library_form(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            plain = plain_schema(grammar.text)
            return _library_schema("{}" if plain == "true" else with_closed_objects(plain))
        case "json_object":
            return _library_schema('{"type": "object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            choices: list[str] = msgspec.json.decode(grammar.text)
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, choices)))
        case "gbnf":
            return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.text))
        case "lark":
            return LLMatcher.grammar_from_lark(with_plain_schemas(grammar.text))
        case "ebnf":
            return _guessed_form(grammar.text)


def _guessed_form(text: str) -> str:
    """Return the form of a grammar whose syntax is not named: GBNF where it is GBNF, else Lark.

    No text is both: each rule of GBNF holds ``::=`` behind its name, which no rule of Lark may.
    """
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(text))
    except InvalidRequestError:
        if _GBNF_RULE.search(text):
            raise
    return LLMatcher.grammar_from_lark(with_plain_schemas(text))


def _library_schema(schema: str) -> str:
    options = _JSON if schema.startswith("{") else None  # not for false, which has nowhere to keep them
    return LLMatcher.grammar_from_json_schema(schema, defaults=options)
