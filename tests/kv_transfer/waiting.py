"""Wait for what another thread does and does not report."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], what: str, timeout_seconds: float = 30.0) -> None:
    """Wait until ``condition`` holds. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_seconds:g} s: {what}")
        time.sleep(0.001)
