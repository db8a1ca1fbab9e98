"""The parts that the runs of all batches share."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from router.batches.answering import AnswerLine
from router.batches.gate import LineGate
from router.batches.storage import Storage

Pause = Callable[[float], Awaitable[None]]
"""Waits for a number of seconds."""
CountResult = Callable[[str, int], None]
"""(result of requests: completed, failed, expired, retried or stopped; number of requests)."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The parts. room_changed: returns an event that is set when the folder may have room again."""

    storage: Storage
    answer: AnswerLine
    gate: LineGate
    room_changed: Callable[[], asyncio.Event]
    count_result: CountResult
    pause: Pause = asyncio.sleep
