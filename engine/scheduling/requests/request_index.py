"""An index of requests: by key, by the client's request id, and by the transfer that they serve."""

from collections.abc import Collection

from contract.requests import EngineRequest, ReceiveTransfer, SendTransfer

_Use = tuple[SendTransfer | ReceiveTransfer, int]


class RequestIndex:
    """A set of requests by key; the cost of a query does not grow with the number of requests.

    A (transfer, attempt) belongs to the choices of at most one request: check ``uses_transfer`` before ``add``.
    """

    def __init__(self) -> None:
        self._asked: dict[str, EngineRequest] = {}
        self._dismissed: dict[str, set[int]] = {}
        self._keys_by_request: dict[str, set[str]] = {}
        self._uses: dict[_Use, int] = {}

    @property
    def keys(self) -> Collection[str]:
        """The keys of all requests, in order of arrival."""
        return self._asked.keys()

    def add(self, asked: EngineRequest, dismissed: set[int]) -> None:
        """Add a request. dismissed: its choices that were cancelled; ``dismiss`` adds to them."""
        self._asked[asked.key] = asked
        self._dismissed[asked.key] = dismissed
        self._keys_by_request.setdefault(asked.request_id, set()).add(asked.key)
        if asked.transfer:
            use = asked.transfer, asked.attempt
            self._uses[use] = self._uses.get(use, 0) + 1

    def discard(self, key: str) -> bool:
        """Remove a request; return False if it is not in the index."""
        asked = self._asked.pop(key, None)
        if asked is None:
            return False
        del self._dismissed[key]
        keys = self._keys_by_request[asked.request_id]
        keys.remove(key)
        if not keys:
            del self._keys_by_request[asked.request_id]
        if asked.transfer:
            self._forget_use((asked.transfer, asked.attempt))
        return True

    def clear(self) -> None:
        """Remove all requests."""
        self._asked.clear()
        self._dismissed.clear()
        self._keys_by_request.clear()
        self._uses.clear()

    def uses_transfer(self, asked: EngineRequest) -> bool:
        """Return whether a request here serves the same transfer in the same attempt."""
        return asked.transfer is not None and (asked.transfer, asked.attempt) in self._uses

    def dismiss(self, request_id: str, up_to_attempt: int | None, choice: int | None) -> list[str]:
        """Cancel this choice (None: all choices) of all attempts up to this one (None: of all).

        Returns the keys of the requests of which every choice is cancelled now, in a fixed order.
        """
        cancelled = []
        for key in sorted(self._keys_by_request.get(request_id, ())):
            asked = self._asked[key]
            dismissed = self._dismissed[key]
            if up_to_attempt is None or asked.attempt <= up_to_attempt:
                dismissed.update(asked.choices if choice is None else {choice})
                if dismissed.issuperset(asked.choices):
                    cancelled.append(key)
        return cancelled

    def check_integrity(self) -> None:
        """Assert that all indexes hold the same requests."""
        by_request = [key for keys in self._keys_by_request.values() for key in keys]
        assert sorted(by_request) == sorted(self._asked) == sorted(self._dismissed)
        uses = [(asked.transfer, asked.attempt) for asked in self._asked.values() if asked.transfer]
        assert {use: uses.count(use) for use in uses} == self._uses

    def _forget_use(self, use: _Use) -> None:
        self._uses[use] -= 1
        if not self._uses[use]:
            del self._uses[use]
