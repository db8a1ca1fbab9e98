"""Stop strings: the answer ends at the first one that completes, wherever the tokens cut it."""

import re
from collections.abc import Sequence

_CHARACTERS = 0x110000


class StopAutomaton:
    """Finds several strings in one pass (Aho and Corasick, 1975). Answers may share it.

    Its states take some 160 bytes each, so they are made when the first character of a string is met in a text, and not
    while a request waits.
    A state is the longest end of the text read so far that begins one of the strings; 0 is the empty one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._edges: dict[int, int] = {}
        self._falls = [0]
        """By state: the next shorter end of the text that begins a string."""
        self._steps = [(0, 0)]
        """By state: the state and the character's code from which it was made."""
        self.depths = [0]
        """By state: its number of characters."""
        self.found: list[str | None] = [None]
        """By state: the longest string that ends there."""
        self._unmade = [stop for stop in stops if stop]
        firsts = {stop[0] for stop in self._unmade}
        self._first = re.compile("[" + "".join(map(re.escape, sorted(firsts))) + "]") if firsts else None

    @property
    def num_states(self) -> int:
        """States that are made; one before the first character of a string is met."""
        return len(self.depths)

    def read(self, state: int, text: str) -> tuple[int, int]:
        """Return the state behind ``text`` and how many of its characters were read: up to the first match, or all."""
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
            state = self._falls[state]
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
                self._falls.append(0)
                self._steps.append((state, ord(character)))
                self.found.append(None)
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        """Set the falls, from shorter states to longer ones."""
        for state in sorted(range(1, len(self.depths)), key=self.depths.__getitem__):
            parent, code = self._steps[state]
            if parent:
                self._falls[state] = self._next(self._falls[parent], code)
            self.found[state] = self.found[state] or self.found[self._falls[state]]


class StopStrings:
    """Passes text through until a stop string completes, whatever pieces the text comes in.

    Of several stop strings the one that completes first counts (of those the longest). Text that could still become a
    stop string is held back; nothing else is. is_kept: the text ends behind the stop string, not before it.
    """

    def __init__(self, stops: StopAutomaton | Sequence[str], *, is_kept: bool = False) -> None:
        self._automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(stops)
        self._is_kept = is_kept
        self._held = ""
        self._state = 0
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """The text that is certain now. After a match it is empty for ever."""
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
        """What was held back, at the end of the text."""
        out = self._held
        self._held = ""
        self._state = 0
        return out


def num_held_back(text: str, wanted: Sequence[str]) -> int:
    """Characters at the end of ``text`` that could still become one of the ``wanted`` strings."""
    longest = 0
    for one in wanted:
        for length in range(min(len(one) - 1, len(text)), longest, -1):
            if text.endswith(one[:length]):
                longest = length
                break
    return longest
