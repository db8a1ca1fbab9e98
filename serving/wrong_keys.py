"""Logs the use of wrong API keys: addresses and counts, never the key."""

import logging

logger = logging.getLogger(__name__)

_MAX_ADDRESSES = 1024


class WrongKeys:
    """Owns a count by address; the 1st, 10th, 100th, ... wrong key of each is logged."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def note(self, address: str) -> None:
        """Count another wrong, or missing, key of this address."""
        count = self._counts.pop(address, 0) + 1
        if len(self._counts) >= _MAX_ADDRESSES:
            del self._counts[next(iter(self._counts))]
        self._counts[address] = count
        if count == 10 ** (len(str(count)) - 1):
            logger.warning("%s was refused for a wrong or missing key (%d times so far)", address, count)
