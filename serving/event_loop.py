"""The event loop of every service: uvloop, which takes less time than asyncio's for a connection, a write and a turn."""

import asyncio
import gc
import sys
from collections.abc import Coroutine
from typing import Any

import uvloop

_NEW_OBJECTS = 5_000
"""New objects after which Python looks for garbage in cycles: a request makes hundreds, and hardly any are in cycles."""


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a service until it ends, or until Ctrl-C cancels it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_without_list_of_generators(main))


async def _without_list_of_generators(main: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` in a loop that keeps no list of open generators: a request opens nine, and each ends with its block."""
    sys.set_asyncgen_hooks(firstiter=None)
    await main


def freeze_objects() -> None:
    """Keep the search for garbage from the objects of now: it would take 0.1 s, in which no token is sent."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 20)
