"""An index of requests: by key, by the client's request id, and by the transfer that they serve."""

from collections.abc import Collection

from contract.requests import EngineRequest, ReceiveTransfer, SendTransfer

_Use = tuple[SendTransfer | ReceiveTransfer, int]


class RequestIndex:
    """A set of requests by key; the cost of a query does not grow with the number of requests.

    keys: of all requests, in order of arrival.
    A (transfer, attempt) belongs to the choices of at most one request: check ``uses_transfer`` before ``add``.
    """

    def __init__(self) -> None:
        self._by_key: dict[str, EngineRequest] = {}
        self.keys: Collection[str] = self._by_key
        self._dismissed: dict[str, set[int]] = {}
        self._keys_by_request: dict[str, set[str]] = {}
        self._uses: dict[_Use, int] = {}

    def add(self, engine_request: EngineRequest, dismissed: set[int]) -> None:
        """Add a request. dismissed: its choices that were cancelled; ``dismiss`` adds to them."""
        self._by_key[engine_request.key] = engine_request
        self._dismissed[engine_request.key] = dismissed
        self._keys_by_request.setdefault(engine_request.request_id, set()).add(engine_request.key)
        if engine_request.transfer:
            # Counted: each choice that has separated is a request of its own with the same transfer.
            use = engine_request.transfer, engine_request.attempt
            self._uses[use] = self._uses.get(use, 0) + 1

    def discard(self, key: str) -> bool:
        """Remove a request; return False if it is not in the index."""
        engine_request = self._by_key.pop(key, None)
        if engine_request is None:
            return False
        del self._dismissed[key]
        keys = self._keys_by_request[engine_request.request_id]
        keys.remove(key)
        if not keys:
            del self._keys_by_request[engine_request.request_id]
        if engine_request.transfer:
            use = engine_request.transfer, engine_request.attempt
            self._uses[use] -= 1
            if not self._uses[use]:
                del self._uses[use]
        return True

    def clear(self) -> None:
        """Remove all requests."""
        self._by_key.clear()
        self._dismissed.clear()
        self._keys_by_request.clear()
        self._uses.clear()

    def uses_transfer(self, engine_request: EngineRequest) -> bool:
        """Return whether a request here serves the same transfer in the same attempt."""
        return (
            engine_request.transfer is not None
            and (engine_request.transfer, engine_request.attempt) in self._uses
        )

    def dismiss(self, request_id: str, up_to_attempt: int | None, choice: int | None) -> list[str]:
        """Cancel this choice (None: all choices) of all attempts up to this one (None: of all).

        Returns the keys of the requests of which every choice is cancelled now, in a fixed order.
        """
        cancelled = []
        # Sorted: a set of strings has another order in each process.
        for key in sorted(self._keys_by_request.get(request_id, ())):
            engine_request = self._by_key[key]
            dismissed = self._dismissed[key]
            if up_to_attempt is None or engine_request.attempt <= up_to_attempt:
                dismissed.update(engine_request.choices if choice is None else {choice})
                if dismissed.issuperset(engine_request.choices):
                    cancelled.append(key)
        return cancelled

    def check_integrity(self) -> None:
        """Assert that all indexes hold the same requests."""
        by_request = [key for keys in self._keys_by_request.values() for key in keys]
        assert sorted(by_request) == sorted(self._by_key) == sorted(self._dismissed)
        uses = [
            (engine_request.transfer, engine_request.attempt)
            for engine_request in self._by_key.values()
            if engine_request.transfer
        ]
        assert {use: uses.count(use) for use in uses} == self._uses
