"""What a receiver keeps open for each source between its reads, safe for one thread per source."""

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from contract.errors import KvbatonError, TransferError
from kv_transfer.protocol.reads import Source


class Keepable(Protocol):
    """A connection, or more, to one source."""

    def interrupt(self) -> None:
        """From any thread: make whoever uses it fail soon. Does not block, and closes nothing."""

    def close(self) -> None:
        """Give everything back. Called exactly once, when nobody uses it."""


_K = TypeVar("_K", bound=Keepable)


class Kept(Generic[_K]):
    """Owns one ``Keepable`` per source. It is closed by its user where that runs, else by whoever forgets it.

    harmless: the error after which it can go on to be used; any other closes it. has_ended: of one that nobody uses; it is
    closed instead of used again.
    """

    def __init__(
        self,
        harmless: type[KvbatonError] | None = None,
        has_ended: Callable[[_K], bool] | None = None,
    ) -> None:
        self._harmless = harmless
        self._has_ended = has_ended
        self._lock = threading.Lock()
        self._kept: dict[Source, _K] = {}
        self._in_use: set[_K] = set()
        self._is_closed = False

    def using(self, source: Source, make: Callable[[], _K]) -> "_Use[_K]":
        """The one of this source, made where there is none. Raises TransferError after ``close``."""
        with self._lock:
            if self._is_closed:
                raise TransferError("the receiver is closed")
            kept = self._kept.get(source)
            has_ended = self._has_ended
            if kept is not None and has_ended is not None and kept not in self._in_use and has_ended(kept):
                del self._kept[source]
                kept.close()
                kept = None
            if kept is None:
                kept = self._kept[source] = make()
            self._in_use.add(kept)
        return _Use(self, source, kept)

    def put_back(self, source: Source, kept: _K, error: BaseException | None) -> None:
        """Its user has let go, with this error."""
        is_good = error is None or (self._harmless is not None and isinstance(error, self._harmless))
        with self._lock:
            self._in_use.discard(kept)
            is_kept = self._kept.get(source) is kept
            if is_kept and is_good:
                return
            if is_kept:
                del self._kept[source]
        kept.close()

    def forget(self, source: Source) -> None:
        """Close the one of this source: now, or when its user has let go, which it is made to do soon."""
        with self._lock:
            kept = self._kept.pop(source, None)
            if kept is None:
                return
            if kept in self._in_use:
                kept.interrupt()
                return
        kept.close()

    def close(self) -> None:
        """Forget all, for good. Idempotent."""
        with self._lock:
            self._is_closed = True
            sources = list(self._kept)
        for source in sources:
            self.forget(source)


class _Use(Generic[_K]):
    """Within, one of the kept is in use. No generator: every read enters this, mostly with cold caches."""

    def __init__(self, keeper: Kept[_K], source: Source, kept: _K) -> None:
        self._keeper = keeper
        self._source = source
        self._kept = kept

    def __enter__(self) -> _K:
        """It is taken already."""
        return self._kept

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._keeper.put_back(self._source, self._kept, error)
