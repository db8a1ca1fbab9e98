"""Requests that are sent ahead of their reads, so that the reads of a group do not wait for one answer after another.

A group of short reads takes longer by the turns of the two ends than by its bytes: each request waits until threads of both
workers, and the network between them, have had their turn. The sender answers the requests of a connection in order
(``transport.py``), so the receiver sends those that it will read next together with the first one. On an idle connection
they are sent before the thread that reads has been woken. Their blocks lie in the sockets' buffers until the read that has
the memory for them receives them. If that read does not come, or another one comes before it, the connection is replaced.
"""

from collections import deque
from collections.abc import Sequence

from contract.errors import InternalError
from kv_transfer.links.framing import encode_frame
from kv_transfer.protocol.reads import ReadRequest
from kv_transfer.transports.data_handshake import MAX_DATA_FRAME_BYTES

MAX_ASKED_BYTES = 8192
"""Bytes of requests that the sender may not have read yet. It reads none while it sends blocks, so these must fit into the
buffers of the sockets: else both ends would wait for each other.
"""


class Asked:
    """The requests that were sent on a connection and whose blocks were not received yet, in order. Not thread-safe."""

    def __init__(self) -> None:
        self._sent: deque[tuple[ReadRequest, int]] = deque()
        """Requests, and the bytes of their frames."""

    @property
    def is_empty(self) -> bool:
        """True if no other blocks are on their way."""
        return not self._sent

    def is_first(self, request: ReadRequest | None) -> bool:
        """Return True if the blocks of this request are the next ones on the connection."""
        return request is not None and bool(self._sent) and self._sent[0][0] == _as_sent(request)

    def frames_for(self, request: ReadRequest, following: Sequence[ReadRequest]) -> bytes:
        """Return what is to be sent before the blocks of ``request`` are received; ``following``: as in ``AsksAhead``.

        Raises InternalError if other blocks come before them.
        """
        if not (self.is_empty or self.is_first(request)):
            raise InternalError(f"blocks of another read come before those of {request.name}")
        frames = self.add([request, *following])
        self._sent.popleft()
        return frames

    def add(self, requests: Sequence[ReadRequest]) -> bytes:
        """Return what is to be sent to ask for these requests, the source's next ones, as far as they were not sent.

        Nothing if others were sent before them.
        """
        wanted = [_as_sent(each) for each in requests]
        frames = bytearray()
        if [sent for sent, _ in self._sent] == wanted[: len(self._sent)]:
            for each in wanted[len(self._sent) :]:
                frame = encode_frame(each, MAX_DATA_FRAME_BYTES)
                num_bytes = sum(num_bytes for _, num_bytes in self._sent)
                if num_bytes and num_bytes + len(frame) > MAX_ASKED_BYTES:
                    break
                self._sent.append((each, len(frame)))
                frames += frame
        return bytes(frames)


def _as_sent(request: ReadRequest) -> ReadRequest:
    """Return the request without the grants, which the sender does not need."""
    return ReadRequest(request.name, request.first_block, request.num_blocks, part=request.part)
