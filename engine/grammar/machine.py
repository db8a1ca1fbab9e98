"""A compiled grammar and its growing size.

All copies of a library machine share its lexer, which keeps every state that any of them reaches. So a compiled grammar
grows while answers use it, even if only the cache holds it. The library does not count its bytes; they are measured when it
is built, and estimated afterwards.
"""

from typing import Any
from weakref import WeakSet

from llguidance import LLMatcher

GROWTH_PER_SECOND = 150e6
"""Bytes for a second of a mask's processor time; 90e6 to 450e6 were measured."""
_MOST_GROWTH = 3
"""The largest factor by which the first mask of an answer may exceed the estimate."""
GROWTH_PER_TOKEN = 4_000
"""Bytes for a token whose mask was fast; up to 16,000 were measured, and 0 where no state is new."""
FAST_SECONDS = 0.5e-3


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

        before: ``num_bytes`` before it. growth: of the heap, which is too little if others freed memory meanwhile.
        """
        self.has_begun = True
        built = max(int((self.num_bytes - before) * _MOST_GROWTH), growth)
        self.num_bytes = before + built
        self.num_built_bytes = max(self.num_built_bytes, self._num_compiled_bytes + built)

    def grow(self, num_tokens: int, mask_seconds: float) -> None:
        """Count the growth by an answer: its new tokens and the processor time of its mask."""
        slow_seconds = max(0.0, mask_seconds - FAST_SECONDS)
        self.num_bytes += int(num_tokens * GROWTH_PER_TOKEN + slow_seconds * GROWTH_PER_SECOND)
