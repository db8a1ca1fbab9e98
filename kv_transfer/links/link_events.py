"""What the I/O thread of the control links is given, and what it reports to."""

from dataclasses import dataclass
from typing import Protocol

from contract.errors import KvbatonError
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol.handshake import Session
from kv_transfer.protocol.messages import Message


class LinkEvents(Protocol):
    """What the I/O thread tells the control half; called in that thread only."""

    def link_up(self, ref: PeerRef, session: Session) -> None:
        """A handshake is through."""

    def link_message(self, ref: PeerRef, message: Message) -> None:
        """A message arrived on a link that is up."""

    def link_down(self, ref: PeerRef, session: Session | None, error: KvbatonError) -> None:
        """A dialed link failed, or one that was up ended; ``error`` says why."""

    def tick(self, now: float) -> float | None:
        """Time passes; returns when the next deadline is."""

    def thread_failed(self, thread: str, error: BaseException) -> None:
        """The I/O thread has ended by a bug."""


@dataclass(frozen=True)
class LinkSettings:
    """Where to listen, and how patient to be."""

    host: str
    port: int
    advertise_host: str | None
    peer_timeout_seconds: float
    max_frame_bytes: int
