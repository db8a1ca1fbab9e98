"""The links that are open, with their handshakes, pings and ends; and the peers that are being dialed.

Host names are looked up in other threads, so that a slow name server does not stop the links.
"""

import errno
import logging
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from contract.errors import (
    ErrorKind,
    InternalError,
    KvbatonError,
    PeerUnreachableError,
    UnavailableError,
    WorkerLostError,
)
from kv_transfer.counters import Counters
from kv_transfer.links.framing import parse_address
from kv_transfer.links.link import Link, LinkEvents, PeerRef
from kv_transfer.links.listening import (
    MAX_UNAUTHENTICATED,
    LogLimiter,
    choose_displaced,
    host_of,
    max_unauthenticated,
)
from kv_transfer.options import LinkSettings
from kv_transfer.protocol.handshake import Accepting, Dialing, LocalIdentity, PeerTarget
from kv_transfer.protocol.messages import Message, Ping

logger = logging.getLogger(__name__)
_MAX_LOOKUPS = 16


@dataclass(frozen=True)
class Endpoint:
    """The socket family and the address to connect to."""

    family: int
    address: Any


Command = Callable[[Callable[[], None], PeerRef], None]
"""Runs a call in the I/O thread, before any later message to that peer; callable from any thread."""

Outcome = Endpoint | OSError | UnicodeError
"""UnicodeError: the text cannot be a host name."""


def resolve(host: str, port: int, flags: int = 0) -> Outcome:
    """Look a host up and return its endpoint or the error. Blocks."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]
    except (OSError, UnicodeError) as error:
        return error
    return Endpoint(family, address)


class OpenLinks:
    """Owns the control links. Used by the I/O thread; ``find`` and ``debug_state`` by any."""

    def __init__(
        self, selector: selectors.BaseSelector, command: Command, settings: LinkSettings, counters: Counters
    ) -> None:
        self._selector = selector
        self._command = command
        self._settings = settings
        self._counters = counters
        self._links: set[Link] = set()
        self._by_ref: dict[PeerRef, Link] = {}
        self._max_unauthenticated = max_unauthenticated(MAX_UNAUTHENTICATED)
        self._failure_log = LogLimiter()

    def start(self, me: LocalIdentity, events: LinkEvents) -> None:
        """Set what handshakes need and what is reported to. Called once, before the I/O thread starts."""
        self._me = me
        self._events = events

    def set_model_fingerprint(self, model_fingerprint: str) -> None:
        """Take part in handshakes with another fingerprint, and end every link whose handshake had the former one."""
        self._me = replace(self._me, model_fingerprint=model_fingerprint)
        for link in list(self._links):
            self._end(link, PeerUnreachableError("the weights of this worker were reloaded"))

    def find(self, ref: PeerRef) -> Link | None:
        """Return a link whose peer is known."""
        return self._by_ref.get(ref)

    def debug_state(self) -> dict[str, Any]:
        """Return the links as plain data (a snapshot without a lock)."""
        return {"peers": [ref._asdict() for ref in list(self._by_ref)]}

    def accept(self, sock: socket.socket) -> None:
        """Begin the handshake on an accepted connection, which may displace another one."""
        unauthenticated = [link for link in self._links if link.session is None and link.target is None]
        if len(unauthenticated) >= self._max_unauthenticated:
            what = f"more than {self._max_unauthenticated} handshakes are not finished"
            self._end(choose_displaced(unauthenticated), WorkerLostError(what))
        self._add(sock, Accepting(self._me)).host = host_of(sock)

    def dial(self, ref: PeerRef, target: PeerTarget, endpoint: Endpoint) -> None:
        """Begin to connect to a peer. Raises OSError."""
        link = self._add(socket.socket(endpoint.family, socket.SOCK_STREAM), Dialing(self._me, target))
        link.ref = ref
        self._by_ref[ref] = link
        code = link.sock.connect_ex(endpoint.address)
        if code not in (0, errno.EINPROGRESS):
            self._close(link)
            raise OSError(code, os.strerror(code))
        self._watch(link)

    def run(self, link: Link, act: Callable[[], None] = lambda: None) -> None:
        """Act on a link, unless it has ended, and flush it. Any error ends this link with its reason, and no other."""
        if link not in self._links:
            return
        try:
            act()
            link.flush(time.monotonic())
            self._watch(link)
        except OSError as error:
            self._end(link, PeerUnreachableError(f"worker {link.worker_id} is gone: {error}"))
        except KvbatonError as error:
            self._end(link, error)
        except Exception as error:  # the boundary of the control protocol
            logger.exception("a control link failed")
            text = f"the control link of worker {link.worker_id} failed: {error}"
            self._end(link, InternalError(text))

    def keep_alive(self, now: float) -> float:
        """End silent links and ping idle ones; return the next deadline, inf if there is none."""
        timeout = self._settings.peer_timeout_seconds
        for link in list(self._links):
            if now - link.heard_at >= timeout:
                what = "was silent" if link.session is not None else "did not finish the handshake"
                self._end(link, PeerUnreachableError(f"worker {link.worker_id} {what} for {timeout} s"))
            elif now >= link.ping_at(timeout):
                self.run(link, partial(link.queue, Ping()))
        deadlines = (min(link.heard_at + timeout, link.ping_at(timeout)) for link in self._links)
        return min(deadlines, default=math.inf)

    def fail_dial(self, ref: PeerRef, target: PeerTarget, reason: object) -> None:
        """Report that a peer cannot be dialed."""
        error = PeerUnreachableError(f"worker {target.worker_id} cannot be dialed: {reason}")
        self._events.link_down(ref, None, error)

    def close(self) -> None:
        """Close every link without a report: peers see this worker's death, not its silence."""
        for link in list(self._links):
            self._close(link)

    def _add(self, sock: socket.socket, handshake: Dialing | Accepting) -> Link:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = Link(sock, handshake, self._settings.max_frame_bytes, time.monotonic())
        self._links.add(link)
        receive = partial(self._receive, link)
        self._selector.register(sock, selectors.EVENT_READ, partial(self.run, link, receive))
        return link

    def _receive(self, link: Link) -> None:
        for message in link.receive(time.monotonic()):
            self._report_up(link)
            if link.ref is not None:
                self._events.link_message(link.ref, message)
        self._report_up(link)

    def _report_up(self, link: Link) -> None:
        """Report that the handshake is complete, once."""
        session = link.session
        if session is None or link.outbox.is_open:
            return
        self._counters.add("link_handshakes_total", result="ok")
        if link.ref is None:
            link.ref = PeerRef(session.boot_id, is_dialed=False)
            older = self._by_ref.get(link.ref)
            # A worker that dials again has lost the older link, though no error has shown that here.
            if older is not None:
                self._end(older, PeerUnreachableError(f"worker {session.worker_id} dialed again"))
            self._by_ref[link.ref] = link
        resume = partial(self._command, partial(self._resume, link), link.ref)
        link.outbox.is_held = not self._events.link_up(link.ref, session, resume)
        link.outbox.open()

    def _resume(self, link: Link) -> None:
        link.outbox.is_held = False
        self.run(link)

    def _watch(self, link: Link) -> None:
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outbox.wants_write else 0)
        key = self._selector.get_key(link.sock)
        if key.events != mask:
            self._selector.modify(link.sock, mask, key.data)

    def _end(self, link: Link, error: KvbatonError) -> None:
        if link.session is None:
            self._refuse(link, error)
        self._close(link)
        if link.ref is not None:
            self._events.link_down(link.ref, link.session, error)

    def _refuse(self, link: Link, error: KvbatonError) -> None:
        self._counters.add("link_handshakes_total", result="failed")
        num_suppressed = 0 if link.target is not None else self._failure_log.admit()
        if num_suppressed is not None:
            more = f" ({num_suppressed} more of these were not logged)" if num_suppressed else ""
            logger.warning("no control link with worker %s: %s%s", link.worker_id, error.message, more)
        if error.kind is not ErrorKind.WORKER_LOST:
            with suppress(OSError):
                link.refuse(error)
                link.flush(time.monotonic())

    def _close(self, link: Link) -> None:
        self._links.discard(link)
        if link.ref is not None and self._by_ref.get(link.ref) is link:
            del self._by_ref[link.ref]
        self._selector.unregister(link.sock)
        link.outbox.close()


@dataclass(eq=False)
class _Lookup:
    """A peer whose name is being looked up; ``messages`` wait for its link."""

    target: PeerTarget
    due_at: float
    messages: list[Message] = field(default_factory=list)


class Dialer:
    """Owns the look-ups of the peers that are being dialed. Used by the I/O thread.

    lookup: (host, port) → outcome; may block. It cannot be interrupted: its thread may outlive this, and then its outcome
    is dropped.
    """

    def __init__(
        self,
        links: OpenLinks,
        command: Command,
        lookup: Callable[[str, int], Outcome],
        timeout_seconds: float,
    ) -> None:
        self._links = links
        self._command = command
        self._lookup = lookup
        self._timeout_seconds = timeout_seconds
        self._pending: dict[PeerRef, _Lookup] = {}
        self._num_threads = 0

    def dial_and_send(self, ref: PeerRef, target: PeerTarget, message: Message) -> None:
        """Send a message to ``target``, dialing it first if there is no link."""
        if self._links.find(ref) is None and ref not in self._pending:
            try:
                self._dial(ref, target)
            except (OSError, KvbatonError) as error:
                self._links.fail_dial(ref, target, error)
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
                reason = f"its name was not found within {self._timeout_seconds} s"
                self._links.fail_dial(ref, pending.target, reason)
        return min((pending.due_at for pending in self._pending.values()), default=math.inf)

    def _dial(self, ref: PeerRef, target: PeerTarget) -> None:
        host, port = parse_address(target.address)
        numeric = resolve(host, port, socket.AI_NUMERICHOST)  # does not block; an error for a name
        if isinstance(numeric, Endpoint):
            self._links.dial(ref, target, numeric)
            return
        if self._num_threads == _MAX_LOOKUPS:
            raise UnavailableError(f"{_MAX_LOOKUPS} host names are being looked up; {host} must wait")
        pending = _Lookup(target, time.monotonic() + self._timeout_seconds)
        work = partial(self._look_up, ref, pending, host, port)
        try:
            threading.Thread(target=work, name="kv-resolve", daemon=True).start()
        except RuntimeError as error:
            raise UnavailableError(f"no thread could be started to look {host} up") from error
        self._num_threads += 1
        self._pending[ref] = pending

    def _look_up(self, ref: PeerRef, pending: _Lookup, host: str, port: int) -> None:
        outcome = self._lookup(host, port)
        self._command(partial(self._on_looked_up, ref, pending, outcome), ref)

    def _on_looked_up(self, ref: PeerRef, pending: _Lookup, outcome: Outcome) -> None:
        self._num_threads -= 1
        if self._pending.get(ref) is not pending:
            return  # it took too long
        del self._pending[ref]
        try:
            if not isinstance(outcome, Endpoint):
                raise outcome
            self._links.dial(ref, pending.target, outcome)
        except (OSError, UnicodeError) as error:
            self._links.fail_dial(ref, pending.target, error)
        for message in pending.messages:
            self.send(ref, message)
