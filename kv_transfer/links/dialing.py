"""Dial peers. Host names are looked up in other threads, so that a slow name server does not stop the links."""

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


class Resolver:
    """The threads that look names up, one per name. lookup: (host, port) → outcome; may block.

    A look-up cannot be interrupted: its thread may outlive ``close``, and then its outcome is dropped.
    """

    def __init__(self, lookup: Callable[[str, int], Outcome] = resolve) -> None:
        self._lookup = lookup
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    def start(self, host: str, port: int, then: Callable[[Outcome], None]) -> None:
        """Look ``host`` up and call ``then``, in another thread. Raises UnavailableError if too many look-ups run."""
        thread = threading.Thread(target=lambda: self._run(host, port, then), name="kv-resolve", daemon=True)
        with self._lock:
            if len(self._threads) >= _MAX_LOOKUPS:
                raise UnavailableError(f"{_MAX_LOOKUPS} host names are being looked up; {host} must wait")
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError as error:
                self._threads.discard(thread)
                raise UnavailableError(f"no thread could be started to look {host} up") from error

    def close(self) -> None:
        """Drop all outcomes from now on."""
        with self._lock:
            self._is_closed = True

    def _run(self, host: str, port: int, then: Callable[[Outcome], None]) -> None:
        outcome = self._lookup(host, port)
        with self._lock:
            self._threads.discard(threading.current_thread())
            if not self._is_closed:
                then(outcome)


@dataclass(eq=False)
class _Lookup:
    """A peer whose name is being looked up; ``messages`` wait for its link."""

    target: PeerTarget
    since: float
    messages: list[Message] = field(default_factory=list)


class Dialer:
    """Owns the look-ups of the peers that are being dialed. Used by the I/O thread.

    command: runs a call in the I/O thread, before any later message to that peer; callable from any thread.
    """

    def __init__(
        self,
        links: OpenLinks,
        command: Callable[[Callable[[], None], PeerRef], None],
        resolver: Resolver,
        timeout_seconds: float,
    ) -> None:
        self._links = links
        self._command = command
        self._resolver = resolver
        self._timeout_seconds = timeout_seconds
        self._lookups: dict[PeerRef, _Lookup] = {}

    def dial_and_send(self, ref: PeerRef, target: PeerTarget, message: Message) -> None:
        """Send a message to ``target``, dialing it first if there is no link."""
        if self._links.find(ref) is None and ref not in self._lookups:
            try:
                self._dial(ref, target)
            except (OSError, KvbatonError) as error:
                self._fail(ref, target, str(error))
                return
        self.send(ref, message)

    def send(self, ref: PeerRef, message: Message) -> None:
        """Queue a message for a link or for a look-up; drop it if there is neither (the peer is gone)."""
        link = self._links.find(ref)
        lookup = self._lookups.get(ref)
        if link is not None:
            self._links.run(link, partial(link.queue, message))
        elif lookup is not None:
            lookup.messages.append(message)

    def end_late(self, now: float) -> float:
        """Fail the look-ups that take too long; return the next deadline, inf if there is none."""
        for ref, lookup in list(self._lookups.items()):
            if now - lookup.since >= self._timeout_seconds:
                del self._lookups[ref]
                self._fail(ref, lookup.target, f"its name was not found within {self._timeout_seconds} s")
        sinces = (lookup.since for lookup in self._lookups.values())
        return min(sinces, default=float("inf")) + self._timeout_seconds

    def close(self) -> None:
        """Drop the outcomes of all look-ups."""
        self._resolver.close()

    def _dial(self, ref: PeerRef, target: PeerTarget) -> None:
        host, port = parse_address(target.address)
        endpoint = numeric(host, port)
        if endpoint is not None:
            self._links.dial(ref, target, endpoint.family, endpoint.address)
            return
        lookup = _Lookup(target, time.monotonic())

        def then(outcome: Outcome) -> None:
            self._command(partial(self._on_looked_up, ref, lookup, outcome), ref)

        self._resolver.start(host, port, then)
        self._lookups[ref] = lookup

    def _on_looked_up(self, ref: PeerRef, lookup: _Lookup, outcome: Outcome) -> None:
        if self._lookups.get(ref) is not lookup:
            return  # it took too long
        del self._lookups[ref]
        try:
            if not isinstance(outcome, Endpoint):
                raise outcome
            self._links.dial(ref, lookup.target, outcome.family, outcome.address)
        except (OSError, UnicodeError) as error:
            self._fail(ref, lookup.target, str(error))
            return
        for message in lookup.messages:
            self.send(ref, message)

    def _fail(self, ref: PeerRef, target: PeerTarget, reason: str) -> None:
        error = PeerUnreachableError(f"worker {target.worker_id} cannot be dialed: {reason}")
        self._links.report_down(ref, error)
