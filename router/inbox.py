"""What workers have said about one attempt and nobody has read yet."""

import asyncio
from typing import Generic, TypeVar

from contract.errors import CancelledError, KvbatonError
from protos import worker_pb2 as pb

Event = pb.TokenEntry | KvbatonError
Source = TypeVar("Source")


class Inbox(Generic[Source]):
    """Owns at most ``max_bytes`` of unread entries; then one CancelledError takes the place of all that follow."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._events: asyncio.Queue[tuple[Source, Event]] = asyncio.Queue()
        self.is_overfull = False

    def put(self, source: Source, event: Event) -> None:
        """Take an event in; look at ``is_overfull`` afterwards."""
        if self.is_overfull:
            return
        self._num_bytes += _size(event)
        if self._num_bytes > self._max_bytes:
            self.is_overfull = True
            event = CancelledError(
                f"the client reads too slowly: more than {self._max_bytes} bytes wait for it; the request is cancelled"
            )
        self._events.put_nowait((source, event))

    async def get(self) -> tuple[Source, Event]:
        """The oldest unread event."""
        source, event = await self._events.get()
        self._num_bytes -= _size(event)
        return source, event


def _size(event: Event) -> int:
    """A prompt's log probabilities come once, and do not count."""
    if not isinstance(event, pb.TokenEntry) or event.prompt_logprobs:
        return 0
    return event.ByteSize()
