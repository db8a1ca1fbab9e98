"""Compiles grammars beside the step thread, each one once.

A compilation cannot be stopped, but it ends: the library counts what it builds, and the text's length is bounded. It
recurses, though, over references from rule to rule, up to 700 bytes of stack for a byte of text (measured; a schema of
objects within objects), where the usual 8 MiB end the process at 12 kB. So its threads have stacks of their own size.
"""

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Queue
from typing import TYPE_CHECKING, TypeVar

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from contract.errors import InternalError, InvalidRequestError, KvbatonError
from contract.requests import MAX_GRAMMAR_BYTES, EngineRequest, Grammar
from engine.grammar.json_schema import with_closed_objects
from engine.grammar.matcher import GrammarMatcher, reason_of

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
Outcome = GrammarMatcher | KvbatonError
_JSON: "JsonCompileOptions" = {"whitespace_pattern": r" |\r?\n[ \t]{0,32}"}
"""A space, or a new line and what indents it: else a model that has never written JSON goes on with spaces for ever."""
_NUM_THREADS = 2
_MAX_CACHED = 64
_STACK_BYTES = MAX_GRAMMAR_BYTES * 2**11
_LIMITS = LLParserLimits(
    step_max_items=10_000, step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False
)
"""A fifth to a half of the library's own, so that no step is held up for more than some 0.1 s by one grammar."""


class GrammarCompiler:
    """Owns the threads, the vocabulary (loaded at first use) and the compiled grammars (the last ones used).

    vocab_size: the model's; ids beyond the tokenizer's are never allowed. All methods are called from one thread.
    """

    def __init__(self, load_vocabulary: Callable[[], LLTokenizer], vocab_size: int) -> None:
        self._load_vocabulary = load_vocabulary
        self._loaded: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._jobs: Queue[Callable[[], None] | None] = Queue()
        self._threads: list[threading.Thread] = []

    def start(
        self, asked: EngineRequest, grammar: Grammar, then: Callable[[Outcome], None]
    ) -> Future[LLMatcher]:
        """Prepare a matcher behind the tokens that were delivered; ``then`` gets it (or the error), in another thread.

        Returns the grammar's compilation; ``running()`` tells whether its turn has come.
        """
        if not self._threads:
            self._threads = _start_threads(self._jobs)
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = Future()
            self._jobs.put(partial(self._compile, grammar, compiled))
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > _MAX_CACHED:
            self._compiled.popitem(last=False)
        compiled.add_done_callback(lambda done: self._jobs.put(partial(self._begin, asked, done, then)))
        return compiled

    def close(self) -> None:
        """End the threads, each after what it is doing."""
        for _ in self._threads:
            self._jobs.put(None)

    def _compile(self, grammar: Grammar, compiled: Future[LLMatcher]) -> None:
        compiled.set_running_or_notify_cancel()
        found = _caught(lambda: _machine(grammar, self._vocabulary()))
        if isinstance(found, KvbatonError):
            compiled.set_exception(found)
        else:
            compiled.set_result(found)

    def _begin(
        self, asked: EngineRequest, compiled: Future[LLMatcher], then: Callable[[Outcome], None]
    ) -> None:
        then(_caught(lambda: self._matcher(asked, compiled.result())))

    def _matcher(self, asked: EngineRequest, machine: LLMatcher) -> GrammarMatcher:
        ends = self._vocabulary().eos_tokens
        matcher = GrammarMatcher(machine.deep_copy(), ends, asked, self._vocab_size)
        num_before = len(asked.prompt_token_ids) - asked.num_delivered_tokens
        matcher.advance(asked.prompt_token_ids[num_before:])
        return matcher

    def _vocabulary(self) -> LLTokenizer:
        with self._loading:
            if self._loaded is None:
                self._loaded = self._load_vocabulary()
            return self._loaded


def _caught(work: Callable[[], _T]) -> _T | KvbatonError:
    """What ``work`` gives, or what it raises: the boundary of the compiling threads."""
    try:
        return work()
    except KvbatonError as error:
        return error
    except BaseException as error:  # the library's panics are no Exceptions
        logger.exception("the grammar library failed")
        return InternalError(f"the grammar library failed: {error!r}")


def _machine(grammar: Grammar, vocabulary: LLTokenizer) -> LLMatcher:
    """The grammar's matcher at its start. Raises InvalidRequestError with the library's words."""
    try:
        machine = LLMatcher(vocabulary, _library_form(grammar), log_level=0, limits=_LIMITS)
    except ValueError as error:
        raise _not_compiled(grammar, str(error)) from error
    if machine.is_error():
        raise _not_compiled(grammar, reason_of(machine))
    return machine


def _not_compiled(grammar: Grammar, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the {grammar.kind} does not compile: {reason}", param="grammar")


def _library_form(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            is_any = grammar.text.strip() == "true"
            return _library_schema("{}" if is_any else with_closed_objects(grammar.text))
        case "json_object":
            return _library_schema('{"type": "object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            choices: list[str] = msgspec.json.decode(grammar.text)
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, choices)))
        case "ebnf":
            return grammar_from("ebnf", grammar.text)


def _library_schema(schema: str) -> str:
    options = (
        _JSON if schema.lstrip().startswith("{") else None
    )  # not for false, which has nowhere to keep them
    return LLMatcher.grammar_from_json_schema(schema, defaults=options)


def _start_threads(jobs: Queue[Callable[[], None] | None]) -> list[threading.Thread]:
    """Raises InternalError where the system has no room for their stacks."""
    threads = [
        threading.Thread(target=_work, args=(jobs,), name=f"grammar-{number}", daemon=True)
        for number in range(_NUM_THREADS)
    ]
    usual = threading.stack_size(_STACK_BYTES)
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:
        raise InternalError(
            f"the grammars' threads cannot have stacks of {_STACK_BYTES} bytes: {error}"
        ) from error
    finally:
        threading.stack_size(usual)
    return threads


def _work(jobs: Queue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
