"""Handles signals promptly while ``input`` waits for a key.

``input`` with readline waits in its own select(2). A signal that arrives just before that sets Python's flag but does not
interrupt the wait, so its handler would run only at the next key: SIGTERM would end nothing. Here a thread is notified of
every signal through the wake-up file descriptor and interrupts the wait with a signal that has no effect of its own.

"""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator

_NUDGE = signal.SIGURG
_NUDGE_AFTER_SECONDS = (0.02, 0.2, 1.0)


@contextlib.contextmanager
def prompt_signals() -> Iterator[None]:
    """Run signal handlers soon within the block, also if the main thread is about to wait. Main thread only."""
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
                received = signals.recv(1)
            except TimeoutError:
                waits.pop(0)
                signal.pthread_kill(main_thread, _NUDGE)
                continue
            if not received:
                return
            if received[0] != _NUDGE:
                waits = list(_NUDGE_AFTER_SECONDS)
