"""The work of the compiling threads: machines of grammars, and matchers of requests, measured as they are built."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llguidance import LLTokenizer

from contract.requests import EngineRequest
from contract.sampling import Grammar
from engine.grammar.limits import MOST_GROWTH_AT_ONCE, MOST_GROWTH_PER_SECOND
from engine.grammar.live_machines import LiveMachines
from engine.grammar.llguidance_matcher import build_matcher
from engine.grammar.machine import Machine
from engine.grammar.matcher import GrammarMatcher
from engine.grammar.memory import HeapTrimmer, heap_meter


@dataclass
class _Growth:
    """The bytes by which the heap has grown."""

    num_bytes: int = 0


class MachineBuilder:
    """Owns the vocabulary, which is loaded at first use. Thread-safe.

    vocab_size: the model's; ids beyond the tokenizer's are never allowed.
    """

    def __init__(
        self,
        load_vocabulary: Callable[[], LLTokenizer],
        vocab_size: int,
        live: LiveMachines,
        trimmer: HeapTrimmer,
    ) -> None:
        self._load_vocabulary = load_vocabulary
        self._loaded: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._vocab_size = vocab_size
        self._live = live
        self._measure = heap_meter()
        self._trimmer = trimmer

    def build(self, grammar: Grammar) -> Machine:
        """Compile a grammar. Raises InvalidRequestError for one that does not compile."""
        vocabulary = self._vocabulary()
        with self._measured() as growth:
            matcher = build_matcher(grammar, vocabulary)
        return Machine(matcher, growth.num_bytes)

    def begin(self, asked: EngineRequest, machine: Machine) -> GrammarMatcher:
        """Return a request's matcher behind the tokens that were delivered.

        Raises OverloadedError for a large grammar while other large ones are in use.
        """
        ends = self._vocabulary().eos_tokens
        num_before = len(asked.prompt_token_ids) - asked.num_delivered_tokens
        bytes_before = machine.num_bytes
        with self._measured() as growth:
            matcher = GrammarMatcher(machine, ends, asked, self._vocab_size)
            matcher.advance(asked.prompt_token_ids[num_before:])
        machine.begin(bytes_before, growth.num_bytes)
        self._live.check_heavy(machine)
        return matcher

    @contextmanager
    def _measured(self) -> Iterator[_Growth]:
        """Measure by how much the block grows the heap, even if it fails.

        Other threads' work counts as well, up to what this thread can have built in its processor time: a worker that has
        just started allocates much, and a small grammar must not be dropped for it.
        """
        growth = _Growth()
        before = self._measure()
        began = time.thread_time()
        try:
            yield growth
        finally:
            most = MOST_GROWTH_AT_ONCE + int((time.thread_time() - began) * MOST_GROWTH_PER_SECOND)
            growth.num_bytes = min(max(0, self._measure() - before), most)
            self._trimmer.note(growth.num_bytes)

    def _vocabulary(self) -> LLTokenizer:
        with self._loading:
            if self._loaded is None:
                self._loaded = self._load_vocabulary()
            return self._loaded
