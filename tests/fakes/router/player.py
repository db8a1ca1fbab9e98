"""The legs of a scripted worker while they are played."""

import asyncio
from dataclasses import dataclass
from functools import partial

from contract.errors import InternalError, NotFoundError
from protos import worker_pb2 as pb
from router.concurrency import TaskSet
from tests.fakes.router.entries import embedding_entry, error_entry, handed_over_entry, token_entry
from tests.fakes.router.script import Script, Writer
from tests.fakes.router.stream import RouterStream


@dataclass
class _Leg:
    """A leg that is played. next_index: index of the token that it emits next. playing: None before it is begun."""

    script: Script
    next_index: int
    playing: asyncio.Task[None] | None = None


class ScriptPlayer:
    """Owns the running legs. Their tokens are sent on ``stream``. script: may be replaced between two legs."""

    def __init__(self, name: str, script: Writer, stream: RouterStream) -> None:
        self._name = name
        self.script = script
        self._stream = stream
        self.may_hand_off = asyncio.Event()
        """Clear it to delay hand-offs."""
        self.may_hand_off.set()
        self.may_prepare = asyncio.Event()
        """Clear it to delay preparations."""
        self.may_prepare.set()
        self._tasks = TaskSet()
        self._legs: dict[tuple[str, int, int], _Leg] = {}

    def begin(self, task: pb.Task, end: int | None, *, is_embedding: bool = False) -> Script:
        """Begin to play one choice of a task, unless its script refuses it, and return the script.

        end: index after the last token of this leg; None: all tokens.
        """
        script = self.script(task)
        if not script.refuse:
            leg = _Leg(script, task.first_index)
            self._legs[task.request_id, task.attempt, task.choice] = leg
            playing = self._play_embedding(task, script) if is_embedding else self._play(task, leg, end)
            leg.playing = self._tasks.spawn(playing, f"{self._name} plays {task.request_id}")
            leg.playing.add_done_callback(partial(self._report_bug, task))
        return script

    def cancel(self, request: pb.CancelRequest) -> None:
        """Stop a choice's attempts up to the given one."""
        for (request_id, attempt, choice), leg in self._legs.items():
            is_same = (request_id, choice) == (request.request_id, request.choice)
            if is_same and attempt <= request.attempt and leg.playing:
                leg.playing.cancel()

    async def hand_off(self, order: pb.HandOffRequest) -> None:
        """End a leg behind the tokens that it has emitted. Raises NotFoundError if it is over, and the script's refusal."""
        await self.may_hand_off.wait()
        leg = self._legs.get((order.request_id, order.attempt, order.choice))
        if leg is None or leg.playing is None or leg.playing.done():
            raise NotFoundError(f"{self._name} does not play {order.request_id}")
        if leg.script.refuse_hand_off:
            raise leg.script.refuse_hand_off
        leg.playing.cancel()
        if leg.script.dies_at_hand_off:
            await self._stream.close()
        else:
            self._stream.send(handed_over_entry(order, leg.next_index))

    async def prepare(self, task: pb.Task) -> None:
        """Return when a choice is prepared. Raises the script's refusal."""
        await self.may_prepare.wait()
        if error := self.script(task).refuse_preparation:
            raise error

    async def close(self) -> None:
        """Stop all legs."""
        await self._tasks.close(0.0)

    def _report_bug(self, task: pb.Task, playing: asyncio.Task[None]) -> None:
        """End a leg whose script cannot be played: its request would wait for its deadline."""
        if not playing.cancelled() and (bug := playing.exception()):
            self._stream.send(error_entry(task, InternalError(f"the script cannot be played: {bug}")))

    async def _play(self, task: pb.Task, leg: _Leg, end: int | None) -> None:
        script = leg.script
        total = min(len(script.tokens), task.sampling.max_tokens)
        stop = total if end is None else min(end, total)
        while (index := leg.next_index) < stop:
            if await self._is_ended_at(index, task, script):
                return
            size = 1 if script.has_event_in(index, script.tokens_per_step) else script.tokens_per_step
            chunk = script.tokens[index : min(index + size, stop)]
            if script.gap_at != index:
                self._stream.send(token_entry(task, script, index, chunk, total))
            leg.next_index += len(chunk)

    async def _play_embedding(self, task: pb.Task, script: Script) -> None:
        if not await self._is_ended_at(0, task, script):
            self._stream.send(embedding_entry(task, script))

    async def _is_ended_at(self, index: int, task: pb.Task, script: Script) -> bool:
        """Play the events before a token. Return True if the leg ends there."""
        if script.token_delay_seconds:
            await asyncio.sleep(script.token_delay_seconds)
        if script.stall_at == index:
            await asyncio.Event().wait()
        if script.die_at == index:
            await self._stream.close()
            return True
        if script.fail_at == index:
            self._stream.send(error_entry(task, script.error))
            return True
        return False
