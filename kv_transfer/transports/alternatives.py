"""What else a peer's blocks can be read over when a read has failed, and which transports a link does without by now."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kv_transfer.counters import Counters
from kv_transfer.protocol.reads import Source

logger = logging.getLogger(__name__)
MAX_FAILED_IN_A_ROW = 2
"""So many transfers in a row may fail over a transport; then the link is read over the next one."""


@dataclass
class _Known:
    """One link's sources, best first, less those that it does without. num_failed: transfers in a row, by transport."""

    sources: list[Source]
    num_failed: dict[str, int] = field(default_factory=dict)
    left: list[Source] = field(default_factory=list)


class Alternatives:
    """Owns what is known of every link's sources, by the token that they share. Thread-safe.

    A link that was not named by ``begin`` has one source, for which nothing else can be taken.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._links: dict[str, _Known] = {}

    def begin(self, sources: Sequence[Source]) -> None:
        """A link is up over which all of these can be read, best first."""
        with self._lock:
            self._links[sources[0].token] = _Known(list(sources))

    def rule_out(self, source: Source) -> None:
        """It was tried, and does not work."""
        with self._lock:
            known = self._links.get(source.token)
            if known is not None:
                known.sources.remove(source)
                known.left.append(source)

    def beside(self, source: Source) -> Source | None:
        """The best other source of the same link."""
        with self._lock:
            known = self._links.get(source.token)
            others = [] if known is None else [other for other in known.sources if other != source]
        return others[0] if others else None

    def failed(self, source: Source) -> Source:
        """A transfer's read from it failed. Returns where the link's next transfers are to be read."""
        with self._lock:
            known = self._links.get(source.token)
            if known is None:
                return source
            num_failed = known.num_failed.get(source.transport, 0) + 1
            known.num_failed[source.transport] = min(num_failed, MAX_FAILED_IN_A_ROW)
            is_spare = source in known.sources and len(known.sources) > 1
            if is_spare and num_failed >= MAX_FAILED_IN_A_ROW:
                self._leave(known, source)
            return known.sources[0]

    def worked(self, source: Source) -> None:
        """A whole transfer was read from it."""
        with self._lock:
            known = self._links.get(source.token)
            if known is not None:
                known.num_failed.pop(source.transport, None)

    def end(self, source: Source) -> list[Source]:
        """The link is gone. Returns all its sources."""
        with self._lock:
            known = self._links.pop(source.token, None)
        return [source] if known is None else known.sources + known.left

    def debug_state(self) -> list[dict[str, Any]]:
        """Every link: over what it can be read, and what it does without."""
        with self._lock:
            return [
                {
                    "worker_id": (known.sources + known.left)[0].worker_id,
                    "transports": [source.transport for source in known.sources],
                    "left": [source.transport for source in known.left],
                }
                for known in self._links.values()
            ]

    def _leave(self, known: _Known, source: Source) -> None:
        known.sources.remove(source)
        known.left.append(source)
        self._counters.add("transfer_transport_left_total", transport=source.transport)
        logger.warning(
            "worker %s is not read over %s any more: %d transfers in a row failed; it is read over %s",
            source.worker_id,
            source.transport,
            MAX_FAILED_IN_A_ROW,
            known.sources[0].transport,
        )
