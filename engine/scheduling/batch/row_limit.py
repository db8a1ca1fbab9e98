"""A limit on the rows of one client in a step, found by measuring steps."""

MIN_ROWS = 2
"""Rows that every client gets, whatever they cost."""
_GROWTH = 1.1
_CUT = 0.9
_UP = 0.02
_DOWN = 0.3
"""Weights of a new length of a short step, if longer and if shorter: a busy moment must not become the measure."""


class RowLimit:
    """A limit that grows while steps stay short, and shrinks when they get too long, like TCP's window.

    The cost of a row is not constant (contexts grow, processors get busy), so the limit is found by trial. Used from one
    thread.

    max_slowdown: how many times as long as a step of a few rows a step may take.
    """

    def __init__(self, max_slowdown: float) -> None:
        self._max_slowdown = max_slowdown
        self._rows = 2.0 * MIN_ROWS
        self._short_seconds = 0.0
        self._seconds = 0.0

    @property
    def rows(self) -> int:
        """The limit."""
        return round(self._rows)

    def note(self, num_rows: int, largest: int | None, seconds: float) -> None:
        """Record a measured step. largest: rows of the client with most; None if it was the only client."""
        if num_rows <= MIN_ROWS + 1:
            weight = _DOWN if seconds < self._short_seconds else _UP
            self._short_seconds = _smoothed(self._short_seconds, seconds, weight)
        if largest is None or not self._short_seconds:
            return
        self._seconds = _smoothed(self._seconds, seconds, 0.5)
        if self._seconds > self._max_slowdown * self._short_seconds:
            self._rows = max(MIN_ROWS, _CUT * min(self._rows, largest))
        elif largest >= self.rows:
            self._rows *= _GROWTH


def _smoothed(known: float, new: float, weight: float) -> float:
    return known + weight * (new - known) if known else new
