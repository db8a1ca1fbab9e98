"""The event loop of every service: uvloop, which takes less time than asyncio's for a connection, a write and a turn."""

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import uvloop

_NEW_OBJECTS = 5_000
"""New objects after which Python looks for garbage in cycles: a request makes hundreds, and hardly any are in cycles."""


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a service until it ends, or until Ctrl-C cancels it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def freeze_objects() -> None:
    """Never look for garbage among the objects of now, which takes 0.1 s in which no token is sent, and seldom later."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 20)
