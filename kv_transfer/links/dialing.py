"""Dial peers. Host names are looked up in other threads, so that a slow name server does not stop the links."""

import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from contract.errors import KvbatonError, PeerUnreachableError, UnavailableError
from kv_transfer.links.framing import parse_address
from kv_transfer.links.link import PeerRef
from kv_transfer.links.open_links import OpenLinks
from kv_transfer.protocol.handshake import PeerTarget
from kv_transfer.protocol.messages import Message

_MAX_LOOKUPS = 16


@dataclass(frozen=True)
class Endpoint:
    """The socket family and the address to connect to."""

    family: int
    address: Any


Outcome = Endpoint | OSError | UnicodeError
"""UnicodeError: the text cannot be a host name."""


def numeric(host: str, port: int) -> Endpoint | None:
    """Return the endpoint of a numeric host, None for a name. Does not block."""
    found = resolve(host, port, socket.AI_NUMERICHOST)
    return found if isinstance(found, Endpoint) else None


def resolve(host: str, port: int, flags: int = 0) -> Outcome:
    """Look a host up and return its endpoint or the error. Blocks."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]
    except (OSError, UnicodeError) as error:
        return error
    return Endpoint(family, address)


@dataclass(eq=False)
class _Lookup:
    """A peer whose name is being looked up; ``messages`` wait for its link."""

    target: PeerTarget
    due_at: float
    messages: list[Message] = field(default_factory=list)


class Dialer:
    """Owns the look-ups of the peers that are being dialed. Used by the I/O thread.

    command: runs a call in the I/O thread, before any later message to that peer; callable from any thread. lookup: (host,
    port) → outcome; may block. It cannot be interrupted: its thread may outlive this, and then its outcome is dropped.
    """

    def __init__(
        self,
        links: OpenLinks,
        command: Callable[[Callable[[], None], PeerRef], None],
        lookup: Callable[[str, int], Outcome],
        timeout_seconds: float,
    ) -> None:
        self._links = links
        self._command = command
        self._lookup = lookup
        self._timeout_seconds = timeout_seconds
        self._pending: dict[PeerRef, _Lookup] = {}
        self._free_threads = threading.Semaphore(_MAX_LOOKUPS)

    def dial_and_send(self, ref: PeerRef, target: PeerTarget, message: Message) -> None:
        """Send a message to ``target``, dialing it first if there is no link."""
        if self._links.find(ref) is None and ref not in self._pending:
            try:
                self._dial(ref, target)
            except (OSError, KvbatonError) as error:
                self._fail(ref, target, str(error))
                return
        self.send(ref, message)

    def send(self, ref: PeerRef, message: Message) -> None:
        """Queue a message for a link or for a look-up; drop it if there is neither (the peer is gone)."""
        link = self._links.find(ref)
        pending = self._pending.get(ref)
        if link is not None:
            self._links.run(link, partial(link.queue, message))
        elif pending is not None:
            pending.messages.append(message)

    def end_late(self, now: float) -> float:
        """Fail the look-ups that take too long; return the next deadline, inf if there is none."""
        for ref, pending in list(self._pending.items()):
            if now >= pending.due_at:
                del self._pending[ref]
                self._fail(ref, pending.target, f"its name was not found within {self._timeout_seconds} s")
        return min((pending.due_at for pending in self._pending.values()), default=math.inf)

    def _dial(self, ref: PeerRef, target: PeerTarget) -> None:
        host, port = parse_address(target.address)
        endpoint = numeric(host, port)
        if endpoint is not None:
            self._links.dial(ref, target, endpoint.family, endpoint.address)
            return
        pending = _Lookup(target, time.monotonic() + self._timeout_seconds)
        if not self._free_threads.acquire(blocking=False):
            raise UnavailableError(f"{_MAX_LOOKUPS} host names are being looked up; {host} must wait")
        work = partial(self._look_up, ref, pending, host, port)
        try:
            threading.Thread(target=work, name="kv-resolve", daemon=True).start()
        except RuntimeError as error:
            self._free_threads.release()
            raise UnavailableError(f"no thread could be started to look {host} up") from error
        self._pending[ref] = pending

    def _look_up(self, ref: PeerRef, pending: _Lookup, host: str, port: int) -> None:
        outcome = self._lookup(host, port)
        self._free_threads.release()
        self._command(partial(self._on_looked_up, ref, pending, outcome), ref)

    def _on_looked_up(self, ref: PeerRef, pending: _Lookup, outcome: Outcome) -> None:
        if self._pending.get(ref) is not pending:
            return  # it took too long
        del self._pending[ref]
        try:
            if not isinstance(outcome, Endpoint):
                raise outcome
            self._links.dial(ref, pending.target, outcome.family, outcome.address)
        except (OSError, UnicodeError) as error:
            self._fail(ref, pending.target, str(error))
            return
        for message in pending.messages:
            self.send(ref, message)

    def _fail(self, ref: PeerRef, target: PeerTarget, reason: str) -> None:
        error = PeerUnreachableError(f"worker {target.worker_id} cannot be dialed: {reason}")
        self._links.report_down(ref, error)
