"""What the data half tells the control half."""

from typing import Protocol

from kv_transfer.protocol import events as ev
from kv_transfer.protocol.reads import LeaseName


class DataReports(Protocol):
    """What the data half tells the control half; called from any thread."""

    def send_event(self, key: str, event: ev.SendEvent) -> None:
        """Something happened to a lent request."""

    def end_expected(self, key: str, seconds: float) -> None:
        """Report that a lent request's transfer will be complete in about ``seconds``."""

    def fetch_event(self, key: str, event: ev.FetchEvent) -> None:
        """Something happened to a fetched request; every posted job ends with exactly one terminal event."""

    def lease_idle(self, name: LeaseName) -> None:
        """Nobody reads a revoked lease any more."""

    def thread_failed(self, thread: str, error: BaseException) -> None:
        """A thread of the connector has ended by a bug: nothing that it served can end properly any more."""
