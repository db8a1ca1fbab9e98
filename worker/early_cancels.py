"""Cancels that arrive before the request that they are for."""

from collections import OrderedDict

MAX_EARLY_CANCELS = 1024


class EarlyCancels:
    """Remembers the most recent cancels of unknown requests, at most ``MAX_EARLY_CANCELS``."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[tuple[str, int | None], int] = OrderedDict()

    def add(self, request_id: str, attempt: int, choice: int | None) -> None:
        """Remember a cancel of a choice (None: all choices) up to ``attempt``."""
        cancel = request_id, choice
        self._attempts[cancel] = max(attempt, self._attempts.pop(cancel, -1))
        if len(self._attempts) > MAX_EARLY_CANCELS:
            self._attempts.popitem(last=False)

    def covers(self, request_id: str, attempt: int, choice: int) -> bool:
        """Return True if this choice of this attempt was cancelled."""
        cancels = [(request_id, None), (request_id, choice)]
        return any(self._attempts.get(cancel, -1) >= attempt for cancel in cancels)
