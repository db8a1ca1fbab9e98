"""Signals at a prompt: none is overlooked while ``input`` waits for a key.

``input`` with readline waits in a select(2) of its own. A signal that arrives just before it sets Python's flag and wakes
nobody, so that its handler would run at the next key: SIGTERM would end nothing. Here a thread hears of every signal
through the wake-up file descriptor and interrupts the wait by a signal that means nothing.
"""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator

_NUDGE = signal.SIGURG
_NUDGE_AFTER_SECONDS = (0.02, 0.2, 1.0)


@contextlib.contextmanager
def heard_signals() -> Iterator[None]:
    """Within the block the handlers of signals run soon, also where the main thread is about to wait. Main thread only."""
    ours, signals = socket.socketpair()
    signals.setblocking(False)
    earlier_handler = signal.signal(_NUDGE, lambda *_: None)
    earlier_fd = signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_nudge, args=(ours, threading.get_ident()), name="prompt-signals")
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier_fd)
        signals.close()
        thread.join()
        signal.signal(_NUDGE, earlier_handler)


def _nudge(signals: socket.socket, main_thread: int) -> None:
    """Interrupt ``main_thread`` a few times after each signal, until the other end is closed."""
    with signals:
        waits: list[float] = []
        while True:
            signals.settimeout(waits[0] if waits else None)
            try:
                heard = signals.recv(1)
            except TimeoutError:
                waits.pop(0)
                signal.pthread_kill(main_thread, _NUDGE)
                continue
            if not heard:
                return
            if heard[0] != _NUDGE:
                waits = list(_NUDGE_AFTER_SECONDS)
