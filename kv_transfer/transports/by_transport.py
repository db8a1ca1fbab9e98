"""The reads of a worker that has several transports: each source names the one that it is read over."""

from collections.abc import Mapping, Sequence

from kv_transfer.protocol.reads import Read, ReadRequest, Source
from kv_transfer.transports.transport import ProbingReceiver, ReadsDevice, ReadsMemory, ask, fetch_first


class ReadsByTransport:
    """Reads each source by the receiver of its transport. Base of ``Chooser``, which sets the receivers."""

    def __init__(self) -> None:
        self._receivers: Mapping[str, ProbingReceiver] = {}

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Fetch by the source's transport."""
        self._receivers[source.transport].fetch(source, request, views, read)

    def ask(self, source: Source, requests: Sequence[ReadRequest]) -> None:
        """See AsksAhead."""
        ask(self._receivers[source.transport], source, requests)

    def fetch_first(
        self,
        source: Source,
        request: ReadRequest,
        views: Sequence[memoryview],
        read: Read,
        following: Sequence[ReadRequest],
    ) -> None:
        """See AsksAhead."""
        fetch_first(self._receivers[source.transport], source, request, views, read, following)

    def is_at_hand(self, source: Source) -> bool:
        """See ReadsMemory."""
        receiver = self._receivers[source.transport]
        return isinstance(receiver, ReadsMemory) and receiver.is_at_hand(source)

    def is_on_our_device(self, source: Source) -> bool:
        """See ReadsDevice."""
        receiver = self._receivers[source.transport]
        return isinstance(receiver, ReadsDevice) and receiver.is_on_our_device(source)
