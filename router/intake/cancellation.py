"""The requests that are being answered, for clients that cancel them by name, and for the end of the router."""

import asyncio
from collections import defaultdict
from contextlib import AbstractContextManager
from hashlib import sha256

from contract.errors import CancelledError, KvbatonError

_MAX_NAME_CHARACTERS = 64
_NO_OWNER = sha256(b"").digest()
_Key = tuple[bytes, str]
"""The digest of an owner's credential, and a name."""
_Named = defaultdict[_Key, "set[OpenRequest]"]


def client_name(given: str | None) -> str | None:
    """Return the name that a client gave its request; None if it gave none, or one that is invalid.

    A valid name is 1 to 64 printable ASCII characters without spaces.
    """
    is_name = given and len(given) <= _MAX_NAME_CHARACTERS and all("!" <= letter <= "~" for letter in given)
    return given if is_name else None


class CancellableRequests:
    """Owns the open requests, by owner and name: a client can only cancel requests of its own.

    owner: the ``Authorization`` that the client sent, of which a digest is kept; empty if it sent none.
    """

    def __init__(self) -> None:
        self._named: _Named = defaultdict(set)
        self._open: set[OpenRequest] = set()

    def open(self, owner: str = "", *names: str | None) -> "OpenRequest":
        """Return a block that ``cancel`` with any of the names ends, wherever it waits, with CancelledError."""
        return OpenRequest(self._open, self._named, owner, names)

    @property
    def num_open(self) -> int:
        """The number of open blocks."""
        return len(self._open)

    def end_all(self, error: KvbatonError) -> None:
        """End every open block with ``error``, since the router stops."""
        for request in self._open:
            request.end(error)

    def cancel(self, owner: str, name: str) -> int:
        """Cancel the requests of this owner that have this name or id. Return how many there were."""
        requests = self._named.get(_key(owner, name), ())
        return sum(
            request.end(CancelledError("the request was cancelled by its client")) for request in requests
        )


class OpenRequest:
    """The block of one request, from ``with`` to its end. Made by ``CancellableRequests.open``.

    The task that enters the block is cancelled to end it; ``asyncio.timeout`` does the same at a given time.
    """

    def __init__(
        self, opened: "set[OpenRequest]", named: "_Named", owner: str, names: tuple[str | None, ...]
    ) -> None:
        self._opened = opened
        self._named = named
        self._keys: set[_Key] = set()
        self._resources: list[AbstractContextManager[object]] = []
        self._error: KvbatonError | None = None
        self._task = asyncio.current_task()
        # a task may be cancelled from outside as well: only a cancellation of its own becomes the error
        self._num_cancels = self._task.cancelling() if self._task else 0
        self.add_names(owner, *names)

    def __enter__(self) -> "OpenRequest":
        self._opened.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._opened.discard(self)
        for key in self._keys:
            self._named[key].discard(self)
            if not self._named[key]:
                del self._named[key]
        for resource in reversed(self._resources):
            resource.__exit__(None, None, None)
        if self._error is None or self._task is None:
            return
        # else the task was cancelled a second time, by its client or the server, and that must go on
        if self._task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            raise self._error from None

    def end(self, error: KvbatonError) -> bool:
        """End the block with ``error``. Return False if another error ends it already."""
        if self._error is not None or self._task is None:
            return False
        self._error = error
        self._task.cancel()
        return True

    def hold(self, resource: AbstractContextManager[object]) -> None:
        """Enter the context of a resource, and leave it when the block ends."""
        resource.__enter__()
        self._resources.append(resource)

    def add_names(self, owner: str, *names: str | None) -> None:
        """Let ``owner`` cancel the request by these names; None is no name."""
        for name in names:
            if name:
                key = _key(owner, name)
                self._keys.add(key)
                self._named[key].add(self)


def _key(owner: str, name: str) -> _Key:
    if not owner:
        return _NO_OWNER, name
    # the scheme ("Bearer") may be written in any way; a digest, so that no credential stays in memory
    _, _, credential = owner.partition(" ")
    return sha256(credential.strip().encode("utf-8", "surrogateescape")).digest(), name
