"""The I/O thread of the control half: it accepts and dials control links, serves them, and keeps the time."""

import math
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from contract.addresses import join_address
from contract.errors import KvbatonError
from kv_transfer.counters import Counters
from kv_transfer.links.link import LinkEvents, PeerRef
from kv_transfer.links.listening import Listener, listen_on
from kv_transfer.links.open_links import Dialer, OpenLinks, Outcome, resolve
from kv_transfer.options import LinkSettings
from kv_transfer.protocol.handshake import LocalIdentity, PeerTarget
from kv_transfer.protocol.messages import Message

# A selector refuses to wait for more than some weeks.
_MAX_WAIT_SECONDS = 3600.0


class CommandQueue:
    """Owns the calls that other threads leave for the I/O thread, and wakes that thread.

    ``add``, ``is_pending_for``, ``wake`` and ``look_by`` may be called from any thread, the rest from the I/O thread.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._lock = threading.Lock()
        self._commands: deque[tuple[Callable[[], None], PeerRef]] = deque()
        self._num_for: Counter[PeerRef] = Counter()
        self._sleeps_until = math.inf
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        selector.register(self._wake_in, selectors.EVENT_READ, self._drain_wakes)

    def add(self, command: Callable[[], None], ref: PeerRef) -> None:
        """Run ``command`` behind those that were added before. ref: the peer that it is for."""
        with self._lock:
            self._commands.append((command, ref))
            self._num_for[ref] += 1
        self.wake()

    def is_pending_for(self, ref: PeerRef) -> bool:
        """Return True if a command for this peer was added and has not finished."""
        return ref in self._num_for

    def wake(self) -> None:
        """Have the I/O thread look at its commands and deadlines now."""
        with suppress(BlockingIOError, OSError):  # a full pipe wakes too; a closed one has no reader
            self._wake_out.send(b"\0")

    def look_by(self, deadline: float) -> None:
        """Wake the thread if it would sleep beyond ``deadline`` (monotonic)."""
        if self._sleeps_until > deadline:
            self.wake()

    def wait(self, deadline: float) -> list[Callable[[], None]]:
        """Wait for a socket, a wake or the deadline; return the handlers of the sockets that are ready."""
        self._sleeps_until = deadline
        seconds = min(max(0.0, deadline - time.monotonic()), _MAX_WAIT_SECONDS)
        ready = self._selector.select(seconds)
        # Before the thread asks for deadlines: a deadline that is added from now on may come too late for that.
        self._sleeps_until = math.inf
        return [key.data for key, _ in ready]

    def run_all(self) -> None:
        """Run everything, also what is added meanwhile."""
        while self._commands:
            command, ref = self._commands.popleft()
            command()
            # Not before it has run: messages of other threads would overtake it.
            with self._lock:
                self._num_for[ref] -= 1
                if not self._num_for[ref]:
                    del self._num_for[ref]

    def close(self) -> None:
        """Close the sockets of ``wake``."""
        self._wake_in.close()
        self._wake_out.close()

    def _drain_wakes(self) -> None:
        with suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass


class LinkLoop:
    """The I/O thread. Public methods may be called from any thread, but for one peer from one thread at a time.

    A message goes out in the thread that sends it, unless a command for its peer is pending: the peer should not wait
    until the I/O thread gets a core.
    """

    def __init__(
        self, settings: LinkSettings, counters: Counters, lookup: Callable[[str, int], Outcome] = resolve
    ) -> None:
        self._listener = Listener(listen_on(settings.host, settings.control_port))
        self.address = join_address(settings.advertise_host or settings.host, self._listener.port)
        self._selector = selectors.DefaultSelector()
        self._commands = CommandQueue(self._selector)
        self._links = OpenLinks(self._selector, self._commands.add, settings, counters)
        self._dialer = Dialer(self._links, self._commands.add, lookup, settings.peer_timeout_seconds)
        self._is_stopping = False
        self._num_rounds = 0
        self._thread = threading.Thread(target=self._run, name="kv-control", daemon=True)

    def start(self, me: LocalIdentity, events: LinkEvents) -> None:
        """Begin to accept and dial. Called exactly once."""
        self._events = events
        self._links.start(me, events)
        self._thread.start()

    def send(self, ref: PeerRef, message: Message) -> None:
        """Send a message on a link that is up; without one it is dropped (the peer is gone)."""
        if not self._send_now(ref, message):
            self._commands.add(partial(self._dialer.send, ref, message), ref)

    def dial_and_send(self, target: PeerTarget, message: Message) -> None:
        """Send a message to ``target``, dialing it first if there is no link."""
        ref = PeerRef(target.boot_id, is_dialed=True)
        if not self._send_now(ref, message):
            self._commands.add(partial(self._dialer.dial_and_send, ref, target, message), ref)

    def _send_now(self, ref: PeerRef, message: Message) -> bool:
        """Send a message in this thread; return False if it has to go through the I/O thread."""
        link = self._links.find(ref)
        try:
            # A message must not overtake one that still waits for the I/O thread.
            is_sent = (
                link is not None and not self._commands.is_pending_for(ref) and link.outbox.send_now(message)
            )
        except KvbatonError:
            is_sent = False  # it will fail again in the I/O thread, and end the link with its reason
        if is_sent and link is not None and link.outbox.wants_write:
            self._commands.add(partial(self._links.run, link), ref)
        return is_sent

    def look_by(self, deadline: float) -> None:
        """Call ``LinkEvents.tick`` by ``deadline`` (monotonic)."""
        self._commands.look_by(deadline)

    def set_model_fingerprint(self, model_fingerprint: str) -> None:
        """Introduce this worker with other weights from now on; all links end, and are opened again when they are needed."""
        change = partial(self._links.set_model_fingerprint, model_fingerprint)
        self._commands.add(change, PeerRef("", is_dialed=False))

    def progress(self) -> int:
        """Wake the thread, and return how many rounds it has finished."""
        self._commands.wake()
        return self._num_rounds

    def close(self) -> None:
        """Stop the thread and close every socket. Idempotent."""
        self._is_stopping = True
        self._commands.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()
        self._commands.close()
        self._selector.close()

    def debug_state(self) -> dict[str, Any]:
        """Return the links as plain data."""
        return {"address": self.address, **self._links.debug_state()}

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: its end must be reported
            self._events.thread_failed(self._thread.name, error)
        finally:
            self._links.close()

    def _serve(self) -> None:
        deadline = math.inf
        while not self._is_stopping:
            self._listener.watch(self._selector, self._accept)
            looked_at = time.monotonic()
            for handle in self._commands.wait(deadline):
                handle()
            self._commands.run_all()
            deadline = self._keep_time(looked_at)
            self._num_rounds += 1

    def _accept(self) -> None:
        for sock in self._listener.accept_some():
            self._links.accept(sock)

    def _keep_time(self, looked_at: float) -> float:
        """Act on the deadlines that have passed; return the next one. looked_at: when this round began to read sockets.

        A peer was silent until then, and not until now: if this thread had to wait for a processor meanwhile, the peer's
        pings may lie unread in the socket. The next round, which follows at once, reads them before it judges again.
        """
        deadlines = [
            self._links.keep_alive(looked_at),
            self._dialer.end_late(looked_at),
            self._listener.resume_at,
        ]
        return min(*deadlines, self._events.tick(time.monotonic()))
