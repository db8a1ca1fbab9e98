"""Stop strings: the answer ends at the first one that completes, wherever the tokens cut it."""

from collections.abc import Sequence


class StopStrings:
    """Passes text through until a stop string completes, whatever pieces the text comes in.

    Of several stop strings the one that completes first counts (of those the longest). Text that could still become a
    stop string is held back; nothing else is. is_kept: the text ends behind the stop string, not before it.
    """

    def __init__(self, stops: Sequence[str], *, is_kept: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._is_kept = is_kept
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """The text that is certain now. After a match it is empty for ever."""
        if self.matched is not None:
            return ""
        self._held += text
        if cut := self._first_match():
            start, self.matched = cut
            end = start + len(self.matched) if self._is_kept else start
            out, self._held = self._held[:end], ""
            return out
        keep = num_held_back(self._held, self._stops)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        out, self._held = self._held, ""
        return out

    def _first_match(self) -> tuple[int, str] | None:
        found = []
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop


def num_held_back(text: str, wanted: Sequence[str]) -> int:
    """Characters at the end of ``text`` that could still become one of the ``wanted`` strings."""
    longest = 0
    for one in wanted:
        for length in range(min(len(one) - 1, len(text)), longest, -1):
            if text.endswith(one[:length]):
                longest = length
                break
    return longest
