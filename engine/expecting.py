"""The calls by which a connector begins with a request before it is added to the scheduler."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from contract.requests import EngineRequest, ReceiveTransfer


@runtime_checkable
class ExpectsRequests(Protocol):
    """A ``ReceiverConnector`` that can begin before a request is added to the scheduler. Called from any thread."""

    def connect(self, transfer: ReceiveTransfer, then: Callable[[], None]) -> None:
        """Connect to a sender, from which a request may come. ``then`` is called when that is over, even if it has failed.

        It is called within this call, or in any thread.
        """

    def expect(self, request: EngineRequest) -> None:
        """Ask for the KV of a request for which ``start_fetch`` or ``drop_expected`` follows.

        ``take_events`` returns no event of it before. Raises InternalError for one whose KV is being fetched already.
        """

    def drop_expected(self, key: str) -> None:
        """Stop fetching for a request that is not added after all; ignores one without ``expect``, or that was added."""
