"""Host names to addresses, away from the thread that keeps the links alive: a slow name server must not silence it."""

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from contract.errors import UnavailableError

_MAX_LOOKUPS = 16


@dataclass(frozen=True)
class Endpoint:
    """What a socket is made of and connected to."""

    family: int
    address: Any


Outcome = Endpoint | OSError | UnicodeError
"""UnicodeError: no host can be called so."""


class Resolver:
    """Owns the threads that look names up, one for each look-up that runs.

    No call can end a look-up: a thread may outlive ``close``, and then tells nobody. lookup: (host, port) → outcome;
    may block.
    """

    def __init__(self, lookup: Callable[[str, int], "Outcome"] | None = None) -> None:
        self._lookup = lookup or resolve
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    def start(self, host: str, port: int, then: Callable[[Outcome], None]) -> None:
        """Look ``host`` up and call ``then``, in another thread. Raises UnavailableError when too many run."""
        thread = threading.Thread(target=lambda: self._run(host, port, then), name="kv-resolve", daemon=True)
        with self._lock:
            if len(self._threads) >= _MAX_LOOKUPS:
                raise UnavailableError(f"{_MAX_LOOKUPS} host names are being looked up; {host} has to wait")
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError as error:
                self._threads.discard(thread)
                raise UnavailableError(f"no thread can be had to look {host} up") from error

    def close(self) -> None:
        """Tell nobody anything from now on."""
        with self._lock:
            self._is_closed = True

    def _run(self, host: str, port: int, then: Callable[[Outcome], None]) -> None:
        outcome = self._lookup(host, port)
        with self._lock:
            self._threads.discard(threading.current_thread())
            if not self._is_closed:
                then(outcome)


def numeric(host: str, port: int) -> Endpoint | None:
    """The endpoint of a host that is written as a number; None for a name. Does not block."""
    found = resolve(host, port, socket.AI_NUMERICHOST)
    return found if isinstance(found, Endpoint) else None


def resolve(host: str, port: int, flags: int = 0) -> Outcome:
    """Look a host up, or say why that failed; blocks."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]
    except (OSError, UnicodeError) as error:
        return error
    return Endpoint(family, address)
