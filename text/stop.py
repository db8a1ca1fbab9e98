"""Stop strings: an answer ends at the first complete one, independent of token boundaries."""

import re
from collections.abc import Sequence

_CHARACTERS = 0x110000


class StopAutomaton:
    """Finds several strings in one pass (Aho and Corasick, 1975). Answers may share it.

    A state takes about 160 bytes, so the states are made when a text contains the first character of a string, and not while
    a request waits. A state is the longest suffix of the text so far that is a prefix of a string; 0 is the empty one.

    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._edges: dict[int, int] = {}
        self._failures = [0]
        """By state: the next shorter suffix that is a prefix of a string."""
        self._steps = [(0, 0)]
        """By state: the state and the character code from which it was made."""
        self.depths = [0]
        """By state: its number of characters."""
        self.found: list[str | None] = [None]
        """By state: the longest string that ends with it."""
        self._unmade = [stop for stop in stops if stop]
        firsts = {stop[0] for stop in self._unmade}
        self._first = re.compile("[" + "".join(map(re.escape, sorted(firsts))) + "]") if firsts else None

    @property
    def is_empty(self) -> bool:
        """True if there are no strings."""
        return self._first is None

    @property
    def num_states(self) -> int:
        """The number of existing states; one until a text contains the first character of a string."""
        return len(self.depths)

    def read(self, state: int, text: str) -> tuple[int, int]:
        """Return the state after ``text`` and the number of characters read: up to the first match, or all."""
        if self._first is None:
            return 0, len(text)
        position = 0
        length = len(text)
        while position < length:
            if state == 0:
                begin = self._first.search(text, position)
                if begin is None:
                    return 0, length
                position = begin.start()
                self._make()
            state = self._next(state, ord(text[position]))
            position += 1
            if self.found[state] is not None:
                break
        return state, position

    def _next(self, state: int, code: int) -> int:
        while (following := self._edges.get(state * _CHARACTERS + code)) is None:
            if state == 0:
                return 0
            state = self._failures[state]
        return following

    def _make(self) -> None:
        unmade = self._unmade
        self._unmade = []
        if unmade:
            for stop in unmade:
                self._add(stop)
            self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            edge = state * _CHARACTERS + ord(character)
            following = self._edges.get(edge)
            if following is None:
                following = self._edges[edge] = len(self.depths)
                self.depths.append(self.depths[state] + 1)
                self._failures.append(0)
                self._steps.append((state, ord(character)))
                self.found.append(None)
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        """Set the failure links, from shorter states to longer ones."""
        for state in sorted(range(1, len(self.depths)), key=self.depths.__getitem__):
            parent, code = self._steps[state]
            if parent:
                self._failures[state] = self._next(self._failures[parent], code)
            self.found[state] = self.found[state] or self.found[self._failures[state]]


class StopStrings:
    """Passes text through until a stop string is complete.

    The stop string that is complete first ends the text (of several the longest). Only text that could still become a stop
    string is held back. is_kept: the text ends after the stop string, not before it.
    """

    def __init__(self, stops: StopAutomaton | Sequence[str], *, is_kept: bool = False) -> None:
        self._automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(stops)
        self._is_kept = is_kept
        self._held = ""
        self._state = 0
        self.matched: str | None = None
        """The stop string that ended the text."""

    @property
    def is_empty(self) -> bool:
        """True if there are no stop strings, so that all text is certain at once."""
        return self._automaton.is_empty

    def push(self, text: str) -> str:
        """Add text and return the text that is certain now; empty after a match."""
        if self.matched is not None:
            return ""
        self._state, num_read = self._automaton.read(self._state, text)
        read = self._held + text[:num_read]
        self.matched = self._automaton.found[self._state]
        if self.matched is not None:
            self._held = ""
            return read if self._is_kept else read[: len(read) - len(self.matched)]
        certain = len(read) - self._automaton.depths[self._state]
        self._held = read[certain:]
        return read[:certain]

    def flush(self) -> str:
        """Return the text that was held back, at the end of the text."""
        out = self._held
        self._held = ""
        self._state = 0
        return out


def num_held_back(text: str, strings: Sequence[str]) -> int:
    """Return the number of characters at the end of ``text`` that could still become one of the strings."""
    longest = 0
    for one in strings:
        for length in range(min(len(one) - 1, len(text)), longest, -1):
            if text.endswith(one[:length]):
                longest = length
                break
    return longest
