"""A cache of compiled grammars, bounded in number and bytes."""

from collections import OrderedDict
from concurrent.futures import Future

from contract.errors import KvbatonError
from contract.sampling import Grammar
from engine.grammar.machine import Machine

Compiled = Future[Machine | KvbatonError]
ENTRY_BYTES = 2**14
"""The minimum bytes of an entry: its objects on both sides of the library."""
BYTES_PER_CHARACTER = 16
"""The minimum bytes for a character of a grammar: the text as a key, and what is compiled from it."""


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
        for grammar in [
            grammar for grammar, entry in self._entries.items() if self._is_spent(grammar, entry)
        ]:
            del self._entries[grammar]
        while len(self._entries) > self._max_count or self.num_bytes > self._max_bytes:
            self._entries.popitem(last=False)

    def _is_spent(self, grammar: Grammar, entry: Compiled) -> bool:
        found = entry.result()
        has_failed = isinstance(found, Machine) and found.has_failed
        return has_failed or _num_bytes(grammar, entry) > self._max_entry_bytes


def _num_bytes(grammar: Grammar, entry: Compiled) -> int:
    found = entry.result()
    least = ENTRY_BYTES + BYTES_PER_CHARACTER * len(grammar.text)
    return max(least, found.num_bytes) if isinstance(found, Machine) else least
