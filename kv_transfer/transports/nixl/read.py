"""A read that is posted to the NIXL library, step by step, and the wait for its end."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from contract.errors import KvbatonError
from engine.mailbox import Mailbox
from kv_transfer.protocol.reads import BlockPart
from kv_transfer.transports.nixl.agent import DescribedRegion, NixlAgent
from kv_transfer.transports.nixl.peer import RemotePool

LATE_SECONDS = 0.02
"""A read that is open for longer may need its sender's help. It is asked for then, and goes on to be asked for."""
Ids = npt.NDArray[np.int32]


@dataclass
class ReadStep:
    """Blocks of one region into blocks of another one of the same size, whole or a part of each."""

    into: DescribedRegion
    into_ids: Ids
    out_of: DescribedRegion
    out_of_ids: Ids
    part: BlockPart | None = None
    is_kept: ClassVar[bool] = False

    def prepare(self, agent: NixlAgent) -> Any:
        """What is posted, and released behind it. Raises KvbatonError."""
        return agent.prepare(
            self.into.blocks(self.part), self.into_ids, self.out_of.blocks(self.part), self.out_of_ids
        )


@dataclass
class SlotsStep:
    """Slots of a peer's table of generations into ``pool.found``."""

    pool: RemotePool
    slots: tuple[int, ...]
    is_kept: ClassVar[bool] = True

    def prepare(self, agent: NixlAgent) -> Any:
        """What is posted; the pool keeps it. Raises KvbatonError."""
        return self.pool.look_at(agent, self.slots)


class NixlRead:
    """One read, of steps of which none is posted before the one before it is terminal.

    Whoever has the agent carries it out; one thread waits. is_late: it was open for LATE_SECONDS. posted: the step that is
    open. handles: what is to be released when it is terminal.
    """

    def __init__(self, pool: RemotePool, steps: Sequence[ReadStep | SlotsStep]) -> None:
        self.pool = pool
        self._steps = iter(steps)
        self.posted: Any = None
        self.handles: list[Any] = []
        self.is_terminal = self.is_late = False
        self._opened_at = time.monotonic()
        self._error: KvbatonError | None = None
        self._news: Mailbox[None] = Mailbox()

    def post_next(self, agent: NixlAgent) -> bool:
        """The step before is terminal: post the next one, and those behind it as long as each is done at once.

        False: all are terminal. Raises KvbatonError for one that fails.
        """
        for step in self._steps:
            self.posted = step.prepare(agent)
            if not step.is_kept:
                self.handles.append(self.posted)
            if not agent.post(self.posted):
                return True
        return False

    def wake(self) -> None:
        """Have who waits look again. Does not block."""
        self._news.put(None)

    def end(self, error: KvbatonError | None) -> None:
        """It is terminal."""
        self._error = error
        self.is_terminal = True
        self.wake()

    def look_at_clock(self) -> None:
        """It is open: if it is late now, say so, once."""
        if not self.is_late and time.monotonic() - self._opened_at >= LATE_SECONDS:
            self.is_late = True
            self.wake()

    def hear(self, timeout_seconds: float) -> bool:
        """Wait until there is something to look at; False: there was nothing for so long."""
        with suppress(Empty):
            self._news.get(timeout_seconds)
            return True
        return False

    def check(self) -> None:
        """Once it is terminal: raise what went wrong."""
        if self._error is not None:
            raise self._error
