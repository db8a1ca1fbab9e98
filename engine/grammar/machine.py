"""Compiled grammars: their growing size, the cache that keeps them, and every limit, the library's own among them.

All copies of a library machine share its lexer, which keeps every state that any of them reaches. So a compiled grammar
grows while answers use it, even if only the cache holds it. The library does not count its bytes; they are measured when it
is built, and estimated afterwards.

The limits were measured on one core of Zen 3 with a vocabulary of 60,000 tokens over some 60 hostile grammars
(docs/security.md): none takes more than 30 MB, 2 s to compile, or 0.2 s for a step.
"""

import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any
from weakref import WeakSet

from llguidance import LLMatcher, LLParserLimits

from contract.errors import KvbatonError, OverloadedError
from contract.sampling import Grammar

GRAMMAR_LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=100_000,
    step_lexer_fuel=40_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    precompute_large_lexemes=True,
    verbose_errors=False,
)
"""initial_lexer_fuel, step_lexer_fuel: some 200 bytes a unit, and max_lexer_states: 1 kB a state; kept by each matcher."""

MAX_CACHED = 64
MAX_CACHED_BYTES = 2**25
MAX_ENTRY_BYTES = 2**24
"""Bounds of the compiled grammars that are cached: all together, and one."""
HEAVY_BYTES = 2**23
MAX_HEAVY_BYTES = 3 * 2**24
"""Grammars that were measured to build HEAVY_BYTES or more: together, those that answers follow at the same time."""
MAX_LIVE_BYTES = 2**32
"""The bound of compiled grammars in use and cached; above it no other grammar is compiled."""
MOST_GROWTH_AT_ONCE = 2**20
MOST_GROWTH_PER_SECOND = 10**9
"""The bytes that a thread can have built: a fixed part, and one for its processor time, twice the most measured."""


GROWTH_PER_SECOND = 150e6
"""Bytes for a second of a mask's processor time; 90e6 to 450e6 were measured."""
# The largest factor by which the first mask of an answer may exceed the estimate.
_MOST_GROWTH = 3
GROWTH_PER_TOKEN = 4_000
"""Bytes for a token whose mask was fast; up to 16,000 were measured, and 0 where no state is new."""
FAST_SECONDS = 0.5e-3
ENTRY_BYTES = 2**14
"""The minimum bytes of an entry: its objects on both sides of the library."""
BYTES_PER_CHARACTER = 16
"""The minimum bytes for a character of a grammar: the text as a key, and what is compiled from it."""


class Machine:
    """Owns the library's machine in its start state; each answer uses a copy.

    num_bytes: the size with the growth by all answers so far. num_built_bytes: the size after compiling and beginning the
    most expensive answer. has_failed: an answer reached a limit of the shared lexer, so that others would fail as well.
    users: the answers that use it now. has_begun: an answer was begun, so that another one needs little time for it.
    """

    def __init__(self, start: LLMatcher, num_bytes: int) -> None:
        self.num_bytes = self.num_built_bytes = self._num_compiled_bytes = num_bytes
        self.has_failed = False
        self.has_begun = False
        self.users: WeakSet[Any] = WeakSet()
        self._start = start

    def copy(self) -> LLMatcher:
        """Return a machine in the start state."""
        return self._start.deep_copy()

    def begin(self, before: int, growth: int) -> None:
        """Count the growth by the begin of an answer: the estimate from its time or the measurement, whichever is more.

        before: ``num_bytes`` before it. growth: of the heap.
        """
        # The measurement is too little if others freed memory meanwhile, so the estimate may count instead.
        self.has_begun = True
        built = max(int((self.num_bytes - before) * _MOST_GROWTH), growth)
        self.num_bytes = before + built
        self.num_built_bytes = max(self.num_built_bytes, self._num_compiled_bytes + built)

    def grow(self, num_tokens: int, mask_seconds: float) -> None:
        """Count the growth by an answer: its new tokens and the processor time of its mask."""
        slow_seconds = max(0.0, mask_seconds - FAST_SECONDS)
        self.num_bytes += int(num_tokens * GROWTH_PER_TOKEN + slow_seconds * GROWTH_PER_SECOND)


class LiveMachines:
    """Counts the bytes of all machines that are in memory, for whatever reason. Thread-safe.

    max_bytes: above this, no new grammar is compiled.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._machines: WeakSet[Machine] = WeakSet()

    def add(self, machine: Machine) -> None:
        """Add a machine; it is removed when its last user is."""
        with self._lock:
            self._machines.add(machine)

    def check_room(self) -> None:
        """Raise OverloadedError while the machines take all the memory that grammars may have."""
        with self._lock:
            num_bytes = sum(machine.num_bytes for machine in self._machines)
        if num_bytes > self._max_bytes:
            raise OverloadedError(
                f"the grammars of running requests take {num_bytes} bytes, of {self._max_bytes}: try again"
            )

    def check_heavy(self, machine: Machine) -> None:
        """Raise OverloadedError for a large machine while other large ones are in use: a client may send many at once."""
        if machine.num_built_bytes < HEAVY_BYTES:
            return
        with self._lock:
            others = [one for one in self._machines if one is not machine and len(one.users)]
        num_bytes = sum(one.num_built_bytes for one in others if one.num_built_bytes >= HEAVY_BYTES)
        if num_bytes + machine.num_built_bytes > MAX_HEAVY_BYTES:
            raise OverloadedError(
                f"the grammar takes {machine.num_built_bytes} bytes, and other large ones of running requests "
                f"{num_bytes}, of {MAX_HEAVY_BYTES} together: try again, or make it simpler"
            )


Compiled = Future[Machine | KvbatonError]


class CompiledGrammars:
    """Owns finished compilations and evicts the least recently used. Not thread-safe.

    max_entry_bytes: a larger compilation is not kept, since compiling it again costs less than its memory.
    """

    def __init__(self, max_count: int, max_bytes: int, max_entry_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._max_entry_bytes = max_entry_bytes
        self._entries: OrderedDict[Grammar, Compiled] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """The bytes of all entries; they may have grown since the last call of another method."""
        return sum(_num_bytes(grammar, entry) for grammar, entry in self._entries.items())

    def get(self, grammar: Grammar) -> Compiled | None:
        """Return the compilation of ``grammar``, which becomes the most recently used."""
        self.drop_spent()
        compiled = self._entries.get(grammar)
        if compiled:
            self._entries.move_to_end(grammar)
        return compiled

    def put(self, grammar: Grammar, compiled: Compiled) -> None:
        """Keep a finished compilation."""
        self._entries[grammar] = compiled
        self.drop_spent()

    def drop_spent(self) -> None:
        """Drop failed and oversized entries, then the oldest ones until the rest fits."""
        for grammar, entry in list(self._entries.items()):
            found = entry.result()
            has_failed = isinstance(found, Machine) and found.has_failed
            if has_failed or _num_bytes(grammar, entry) > self._max_entry_bytes:
                del self._entries[grammar]
        while len(self._entries) > self._max_count or self.num_bytes > self._max_bytes:
            self._entries.popitem(last=False)


def _num_bytes(grammar: Grammar, entry: Compiled) -> int:
    found = entry.result()
    least = ENTRY_BYTES + BYTES_PER_CHARACTER * len(grammar.text)
    return max(least, found.num_bytes) if isinstance(found, Machine) else least
