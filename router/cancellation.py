"""The requests that are being answered, for clients that cancel them by name, and for the end of the router."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256

from contract.errors import CancelledError, KvbatonError

_MAX_NAME_CHARACTERS = 64
_Key = tuple[bytes, str]
"""The digest of an owner's credential, and a name."""
_Scopes = defaultdict[_Key, set[asyncio.Timeout]]


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
        self._scopes: _Scopes = defaultdict(set)
        self._open: set[asyncio.Timeout] = set()
        self._ending: KvbatonError | None = None

    @asynccontextmanager
    async def open(self, owner: str = "", *names: str | None) -> AsyncIterator["OpenRequest"]:
        """Open a block that ``cancel`` with any of the names ends, wherever it waits, with CancelledError.

        Further names can be added in the block.
        """
        scope = asyncio.timeout(None)
        request = OpenRequest(self._scopes, scope)
        request.add_names(owner, *names)
        try:
            async with scope:
                self._open.add(scope)
                try:
                    yield request
                finally:
                    self._open.discard(scope)
                    request.forget_names()
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


class OpenRequest:
    """The names of one open request. ``CancellableRequests.open`` makes it, and gives ``scope``, which ends the request."""

    def __init__(self, scopes: "_Scopes", scope: asyncio.Timeout) -> None:
        self._scopes = scopes
        self._scope = scope
        self._keys: set[_Key] = set()

    def add_names(self, owner: str, *names: str | None) -> None:
        """Let ``owner`` cancel the request by these names; None is no name."""
        for key in {_key(owner, name) for name in names if name}:
            self._keys.add(key)
            self._scopes[key].add(self._scope)

    def forget_names(self) -> None:
        """Remove all names: the request has ended."""
        for key in self._keys:
            self._scopes[key].discard(self._scope)
            if not self._scopes[key]:
                del self._scopes[key]


def _key(owner: str, name: str) -> _Key:
    _, _, credential = owner.partition(" ")
    return sha256(credential.strip().encode("utf-8", "surrogateescape")).digest(), name
