"""The control half's one I/O thread: it owns the listener and every control link, and keeps the time.

It dials on demand, runs the handshakes, pings idle links, and declares a peer dead when its link closes or is silent.
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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from contract.errors import (
    ErrorKind,
    InternalError,
    KvbatonError,
    PeerUnreachableError,
    WorkerLostError,
)
from kv_transfer.counters import Counters
from kv_transfer.links.framing import format_address, listen_on, parse_address
from kv_transfer.links.link import Link, LinkClosedError, PeerRef
from kv_transfer.links.link_events import LinkEvents, LinkSettings
from kv_transfer.links.link_orders import LinkOrders
from kv_transfer.links.listening import Listener
from kv_transfer.links.resolving import Endpoint, Outcome, Resolver, numeric
from kv_transfer.links.unauthenticated import (
    MAX_UNAUTHENTICATED,
    Seldom,
    giving_way,
    host_of,
    max_unauthenticated,
)
from kv_transfer.protocol.handshake import Accepting, Dialing, LocalIdentity, PeerTarget
from kv_transfer.protocol.messages import Message, Ping

logger = logging.getLogger(__name__)
_PINGS_PER_TIMEOUT = 3
_MAX_WAIT_SECONDS = 3600.0
"""A selector refuses to wait for more than some weeks."""


@dataclass(eq=False)
class _Lookup:
    """A peer's name is being looked up; ``messages`` wait for its link."""

    target: PeerTarget
    since: float
    messages: list[Message] = field(default_factory=list)


class LinkLoop:
    """The I/O thread. What is public may be called from any thread, for one peer by one at a time.

    A message goes out in the thread that sends it, unless an order for its peer waits: the other side shall not wait until
    this process has a core for the I/O thread too.
    """

    def __init__(self, settings: LinkSettings, counters: Counters, resolver: Resolver | None = None) -> None:
        self._settings = settings
        self._counters = counters
        self._listener = Listener(listen_on(settings.host, settings.port))
        self.address = format_address(settings.advertise_host or settings.host, self._listener.port)
        self._orders = LinkOrders()
        self._sleeps_until: float | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._links: set[Link] = set()
        self._by_ref: dict[PeerRef, Link] = {}
        self._resolver = resolver or Resolver()
        self._lookups: dict[PeerRef, _Lookup] = {}
        self._is_stopping = False
        self._num_rounds = 0
        self._max_unauthenticated = max_unauthenticated(MAX_UNAUTHENTICATED)
        self._unauthenticated_log = Seldom()
        self._thread = threading.Thread(target=self._run, name="kv-control", daemon=True)

    def start(self, me: LocalIdentity, events: LinkEvents) -> None:
        """Begin to accept and dial. Called exactly once."""
        self._me = me
        self._events = events
        self._thread.start()

    def send(self, ref: PeerRef, message: Message) -> None:
        """Send a message over a link that is up; without one it is dropped (the peer is dead)."""
        link = self._by_ref.get(ref)
        try:
            is_sent = link is not None and not self._orders.are_open_for(ref) and link.send_now(message)
        except KvbatonError:
            is_sent = False  # it will fail again, and end the link with its reason
        if not is_sent:
            self._order(partial(self._send, ref, message), ref)
        elif link is not None and link.wants_write:
            self._order(partial(self._guard, link, lambda: None), ref)

    def dial_and_send(self, target: PeerTarget, message: Message) -> None:
        """Like ``send`` to ``target``, dialing it first where no link stands."""
        ref = PeerRef(target.boot_id, is_dialed=True)
        self._order(partial(self._dial_and_send, ref, target, message), ref)

    def _order(self, act: Callable[[], None], ref: PeerRef | None = None) -> None:
        """Have the I/O thread do it, before anything that is sent to this peer later."""
        self._orders.add(act, ref)
        self.wake()

    def hold(self, ref: PeerRef, token: str) -> None:
        """Within ``link_up``: send nothing on this link, not even the end of its handshake, before ``let_go``."""
        self._by_ref[ref].held_for = token

    def let_go(self, ref: PeerRef, token: str) -> None:
        """The session of a link that is held is known everywhere; without such a link nothing happens."""
        self._order(partial(self._let_go, ref, token))

    def look_by(self, deadline: float | None) -> None:
        """Something is due then (monotonic): wake the thread, unless it looks at its deadlines before anyway."""
        until = self._sleeps_until
        if deadline is not None and (until is None or until > deadline):
            self.wake()

    def wake(self) -> None:
        """Make the thread look at its commands and deadlines now."""
        with suppress(BlockingIOError, OSError):  # a full pipe wakes too; a closed one has nobody to wake
            self._wake_out.send(b"\0")

    def progress(self) -> int:
        """Wake the thread, and return how often it has done what there was to do."""
        self.wake()
        return self._num_rounds

    def close(self) -> None:
        """Stop the thread and close every socket. Idempotent."""
        self._is_stopping = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._resolver.close()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()
        self._selector.close()

    def debug_state(self) -> dict[str, Any]:
        """The links, as seen from any thread (a snapshot without a lock)."""
        return {
            "address": self.address,
            "num_links": len(self._links),
            "peers": [{"boot_id": ref.boot_id, "is_dialed": ref.is_dialed} for ref in list(self._by_ref)],
        }

    def _run(self) -> None:
        try:
            self._serve_links()
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: the connector must hear of its end
            self._events.thread_failed(self._thread.name, error)
        finally:  # also after a bug: peers must see this worker's death, not its silence
            for link in list(self._links):
                self._close(link)

    def _serve_links(self) -> None:
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._drain_wakes)
        deadline: float | None = None
        while not self._is_stopping:
            self._listener.watch(self._selector, self._accept)
            self._sleeps_until = deadline
            ready = self._selector.select(_seconds_until(deadline))
            self._sleeps_until = (
                None  # before it asks for deadlines: one that comes now may be too late for that
            )
            for key, _ in ready:
                key.data()
            self._orders.carry_out()
            deadline = self._keep_time(time.monotonic())
            self._num_rounds += 1

    def _drain_wakes(self) -> None:
        with suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass

    def _accept(self) -> None:
        for sock in self._listener.accept_some():
            unauthenticated = [link for link in self._links if link.session is None and link.target is None]
            if len(unauthenticated) >= self._max_unauthenticated:
                what = f"more than {self._max_unauthenticated} handshakes are not finished"
                self._end(giving_way(unauthenticated), WorkerLostError(what))
            self._add(sock, Accepting(self._me)).host = host_of(sock)

    def _add(self, sock: socket.socket, handshake: Dialing | Accepting) -> Link:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = Link(sock, handshake, self._settings.max_frame_bytes, time.monotonic())
        self._links.add(link)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._serve, link))
        return link

    def _dial_and_send(self, ref: PeerRef, target: PeerTarget, message: Message) -> None:
        if ref not in self._by_ref and ref not in self._lookups:
            try:
                self._dial(ref, target)
            except (OSError, KvbatonError) as error:
                self._cannot_dial(ref, target, str(error))
                return
        self._send(ref, message)

    def _dial(self, ref: PeerRef, target: PeerTarget) -> None:
        host, port = parse_address(target.address)
        endpoint = numeric(host, port)
        if endpoint is not None:
            self._connect(ref, target, endpoint)
            return
        lookup = _Lookup(target, time.monotonic())

        def then(outcome: Outcome) -> None:
            self._order(partial(self._looked_up, ref, lookup, outcome))

        self._resolver.start(host, port, then)
        self._lookups[ref] = lookup

    def _looked_up(self, ref: PeerRef, lookup: _Lookup, outcome: Outcome) -> None:
        if self._lookups.get(ref) is not lookup:
            return  # it took too long
        del self._lookups[ref]
        try:
            if not isinstance(outcome, Endpoint):
                raise outcome
            self._connect(ref, lookup.target, outcome)
        except (OSError, UnicodeError) as error:
            self._cannot_dial(ref, lookup.target, str(error))
            return
        for message in lookup.messages:
            self._send(ref, message)

    def _cannot_dial(self, ref: PeerRef, target: PeerTarget, reason: str) -> None:
        self._events.link_down(ref, None, _unreachable(target.worker_id, f"cannot be dialed: {reason}"))

    def _connect(self, ref: PeerRef, target: PeerTarget, endpoint: Endpoint) -> None:
        sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
        link = self._add(sock, Dialing(self._me, target))
        link.ref = ref
        link.target = target
        link.is_connecting = True
        self._by_ref[ref] = link
        code = link.sock.connect_ex(endpoint.address)
        if code not in (0, errno.EINPROGRESS):
            self._close(link)
            raise OSError(code, os.strerror(code))
        self._watch(link)

    def _send(self, ref: PeerRef, message: Message) -> None:
        link = self._by_ref.get(ref)
        lookup = self._lookups.get(ref)
        if link is not None:
            self._guard(link, lambda: link.queue(message))
        elif lookup is not None:
            lookup.messages.append(message)

    def _let_go(self, ref: PeerRef, token: str) -> None:
        link = self._by_ref.get(ref)
        if link is not None and link.held_for == token:
            link.held_for = None
            self._guard(link, lambda: None)

    def _serve(self, link: Link) -> None:
        if link in self._links:
            self._guard(link, lambda: self._read(link))

    def _read(self, link: Link) -> None:
        if link.is_connecting:
            link.finish_connecting()
            return
        was_up = link.session is not None
        for message in link.receive(time.monotonic()):
            was_up = was_up or self._welcome(link)
            if link.ref is not None:
                self._events.link_message(link.ref, message)
        if not was_up and link.session is not None:
            self._welcome(link)

    def _welcome(self, link: Link) -> bool:
        session = link.session
        if session is None:
            return False
        self._counters.add("link_handshakes_total", result="ok")
        if link.ref is None:
            link.ref = PeerRef(session.boot_id, is_dialed=False)
            older = self._by_ref.get(link.ref)
            if older is not None:
                self._end(older, PeerUnreachableError(f"worker {session.worker_id} dialed again"))
            self._by_ref[link.ref] = link
        self._events.link_up(link.ref, session)
        link.open()
        return True

    def _guard(self, link: Link, act: Callable[[], None]) -> None:
        """The boundary of the control protocol: whatever goes wrong on a link ends that link, with its reason."""
        try:
            act()
            link.flush(time.monotonic())
            self._watch(link)
        except OSError as error:
            reason = "closed its control link" if isinstance(error, LinkClosedError) else f"is gone: {error}"
            self._end(link, _unreachable(_name(link), reason))
        except KvbatonError as error:
            self._end(link, error)
        except Exception as error:  # this link's boundary, see above: the other links go on
            logger.exception("a control link failed")
            self._end(link, InternalError(f"the control link of worker {_name(link)} failed: {error}"))

    def _watch(self, link: Link) -> None:
        if link in self._links:
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_write else 0)
            if self._selector.get_key(link.sock).events != mask:
                self._selector.modify(link.sock, mask, partial(self._serve, link))

    def _end(self, link: Link, error: KvbatonError) -> None:
        if link not in self._links:
            return
        if link.session is None:
            self._counters.add("link_handshakes_total", result="failed")
            held = 0 if link.target is not None else self._unauthenticated_log.ask()
            if held is not None:
                more = f" ({held} more since the last of these lines)" if held else ""
                logger.warning("no control link with worker %s: %s%s", _name(link), error.message, more)
            if error.kind is not ErrorKind.WORKER_LOST:
                with suppress(OSError):
                    link.refuse(error)
                    link.flush(time.monotonic())
        self._close(link)
        if link.ref is not None:
            self._events.link_down(link.ref, link.session, error)

    def _close(self, link: Link) -> None:
        self._links.discard(link)
        if link.ref is not None and self._by_ref.get(link.ref) is link:
            del self._by_ref[link.ref]
        self._selector.unregister(link.sock)
        link.close()

    def _keep_time(self, now: float) -> float | None:
        """End silent links, ping idle ones; returns when to look again."""
        timeout = self._settings.peer_timeout_seconds
        for link in list(self._links):
            if now - link.heard_at >= timeout:
                what = "was silent" if link.session is not None else "did not finish the handshake"
                self._end(link, _unreachable(_name(link), f"{what} for {timeout} s"))
            elif now >= self._ping_at(link):
                self._guard(link, partial(link.queue, Ping()))
        for ref, lookup in list(self._lookups.items()):
            if now - lookup.since >= timeout:
                del self._lookups[ref]
                self._cannot_dial(ref, lookup.target, f"its name was not found within {timeout} s")
        deadlines = [link.heard_at + timeout for link in self._links]
        deadlines += [lookup.since + timeout for lookup in self._lookups.values()]
        deadlines.append(self._listener.resume_at)
        deadlines += [self._ping_at(link) for link in self._links]
        next_deadline = self._events.tick(now)
        return min(deadlines + ([] if next_deadline is None else [next_deadline]), default=None)

    def _ping_at(self, link: Link) -> float:
        """When an idle link needs a ping, for the less patient of the two sides."""
        if link.session is None or link.wants_write or link.held_for is not None:
            return math.inf  # bytes that still wait are as good as a ping
        timeout = min(self._settings.peer_timeout_seconds, link.session.timeout_seconds)
        return link.sent_at + timeout / _PINGS_PER_TIMEOUT


def _seconds_until(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    return min(max(0.0, deadline - time.monotonic()), _MAX_WAIT_SECONDS)


def _name(link: Link) -> str:
    if link.session is not None:
        return link.session.worker_id
    return link.target.worker_id if link.target is not None else "(unknown)"


def _unreachable(worker_id: str, reason: str) -> PeerUnreachableError:
    return PeerUnreachableError(f"worker {worker_id} {reason}")
