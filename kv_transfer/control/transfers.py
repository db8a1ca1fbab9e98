"""The parts that both sides of the control half share: the lock around their state, and the table of transfers."""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Generic, Protocol, TypeVar

from contract.errors import InternalError


class Transfers:
    """State behind ``_lock``. Calls that could take another lock, or block, wait in ``_later`` until it is free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._later: list[Callable[[], None]] = []

    @contextmanager
    def _acting(self) -> Iterator[None]:
        """Hold the lock; afterwards make the calls in ``_later``, in order.

        Each call is made whatever the body or an earlier call raised: blocks stay taken until a lease is released or a
        read is stopped. The last exception is raised, with the earlier ones as its context.
        """
        with ExitStack() as calls, self._lock:
            try:
                yield
            finally:
                for call in reversed(self._later):
                    calls.callback(call)
                self._later.clear()


class _Transfer(Protocol):
    @property
    def key(self) -> str | None: ...

    @property
    def wire_key(self) -> Hashable: ...


_T = TypeVar("_T", bound=_Transfer)


class TransferTable(Generic[_T]):
    """Transfers by their requests' keys, and by the keys that messages name them by. Not thread-safe."""

    def __init__(self) -> None:
        self._by_key: dict[str, _T] = {}
        self._by_wire_key: dict[Hashable, _T] = {}

    def __iter__(self) -> Iterator[_T]:
        """Iterate over a copy, so that transfers may be removed meanwhile."""
        return iter(list(self._by_wire_key.values()))

    def get(self, key: str) -> _T | None:
        """Return the transfer of a request."""
        return self._by_key.get(key)

    def find(self, key: str) -> _T:
        """Return the transfer of a request. Raises InternalError if there is none."""
        transfer = self._by_key.get(key)
        if transfer is None:
            raise InternalError(f"request {key} has no transfer")
        return transfer

    def get_by_wire(self, wire_key: Hashable) -> _T | None:
        """Return the transfer that a message names."""
        return self._by_wire_key.get(wire_key)

    def add(self, transfer: _T) -> None:
        """Add a transfer; called again once it has a key."""
        self._by_wire_key[transfer.wire_key] = transfer
        if transfer.key is not None:
            self._by_key[transfer.key] = transfer

    def remove(self, transfer: _T) -> None:
        """Remove a transfer, if it is there."""
        self._by_wire_key.pop(transfer.wire_key, None)
        if transfer.key is not None:
            self._by_key.pop(transfer.key, None)
