"""The requests that are being answered, for clients that cancel them by name, and for the end of the router."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256

from contract.errors import CancelledError, KvbatonError

_MAX_NAME_CHARACTERS = 64


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
        self._scopes: defaultdict[tuple[bytes, str], set[asyncio.Timeout]] = defaultdict(set)
        self._open: set[asyncio.Timeout] = set()
        self._ending: KvbatonError | None = None

    @asynccontextmanager
    async def open(self, owner: str, *names: str | None) -> AsyncIterator[None]:
        """Open a block that ``cancel`` with any of the names ends, wherever it waits, with CancelledError."""
        keys = {_key(owner, name) for name in names if name}
        scope = asyncio.timeout(None)
        try:
            async with scope:
                for key in keys:
                    self._scopes[key].add(scope)
                self._open.add(scope)
                try:
                    yield
                finally:
                    self._open.discard(scope)
                    self._forget(keys, scope)
        except TimeoutError:
            if not scope.expired():
                raise
            raise self._ending or CancelledError("the request was cancelled by its client") from None

    @property
    def num_open(self) -> int:
        """The number of open blocks."""
        return len(self._open)

    def end_all(self, error: KvbatonError) -> None:
        """End every open block with ``error``, since the router stops."""
        self._ending = error
        for scope in [scope for scope in self._open if scope.when() is None]:
            scope.reschedule(asyncio.get_running_loop().time())

    def cancel(self, owner: str, name: str) -> int:
        """Cancel the requests of this owner that have this name or id. Return how many there were."""
        scopes = [scope for scope in self._scopes.get(_key(owner, name), ()) if scope.when() is None]
        for scope in scopes:
            scope.reschedule(asyncio.get_running_loop().time())
        return len(scopes)

    def _forget(self, keys: set[tuple[bytes, str]], scope: asyncio.Timeout) -> None:
        for key in keys:
            self._scopes[key].discard(scope)
            if not self._scopes[key]:
                del self._scopes[key]


def _key(owner: str, name: str) -> tuple[bytes, str]:
    _, _, credential = owner.partition(" ")
    return sha256(credential.strip().encode("utf-8", "surrogateescape")).digest(), name
