"""Who is here: requests found by their key, by the client's request id, and by the transfer that they serve."""

from collections.abc import Collection

from contract.requests import EngineRequest, ReceiveTransfer, SendTransfer

_Use = tuple[SendTransfer | ReceiveTransfer, int]


class Roll:
    """A set of requests by key; no question looks at more of them than it is about.

    A (transfer, attempt) belongs to at most one of them: ask ``uses_transfer`` before ``add``.
    """

    def __init__(self) -> None:
        self._asked: dict[str, EngineRequest] = {}
        self._keys_by_request: dict[str, set[str]] = {}
        self._uses: set[_Use] = set()

    @property
    def keys(self) -> Collection[str]:
        """The keys of all, in order of arrival."""
        return self._asked.keys()

    def add(self, asked: EngineRequest) -> None:
        """The request is here from now on."""
        self._asked[asked.key] = asked
        self._keys_by_request.setdefault(asked.request_id, set()).add(asked.key)
        if asked.transfer:
            self._uses.add((asked.transfer, asked.attempt))

    def discard(self, key: str) -> bool:
        """The request is gone; False, and nothing happens, where it was not here."""
        asked = self._asked.pop(key, None)
        if asked is None:
            return False
        keys = self._keys_by_request[asked.request_id]
        keys.remove(key)
        if not keys:
            del self._keys_by_request[asked.request_id]
        if asked.transfer:
            self._uses.remove((asked.transfer, asked.attempt))
        return True

    def uses_transfer(self, asked: EngineRequest) -> bool:
        """True when somebody here serves the same transfer in the same attempt."""
        return asked.transfer is not None and (asked.transfer, asked.attempt) in self._uses

    def keys_of(self, request_id: str, up_to_attempt: int | None) -> list[str]:
        """Keys of all choices of a request, of all attempts up to this one (None: of all), in a fixed order."""
        keys = sorted(self._keys_by_request.get(request_id, ()))
        return [key for key in keys if up_to_attempt is None or self._asked[key].attempt <= up_to_attempt]

    def check_integrity(self) -> None:
        """Assert that all indexes tell of the same requests."""
        by_request = [key for keys in self._keys_by_request.values() for key in keys]
        assert sorted(by_request) == sorted(self._asked)
        uses = {(asked.transfer, asked.attempt) for asked in self._asked.values() if asked.transfer}
        assert uses == self._uses
