"""The legs of a scripted worker while they are played."""

import asyncio

from protos import worker_pb2 as pb
from router.tasks import TaskSet
from router.testing.entries import embedding_entry, error_entry, token_entry
from router.testing.script import Script, Writer
from router.testing.stream import RouterStream


class ScriptPlayer:
    """Owns the running legs. Their tokens are sent on ``stream``. script: may be replaced between two legs."""

    def __init__(self, name: str, script: Writer, stream: RouterStream) -> None:
        self._name = name
        self.script = script
        self._stream = stream
        self._tasks = TaskSet()
        self._legs: dict[tuple[str, int, int], asyncio.Task[None]] = {}

    def begin(self, task: pb.Task, end: int | None, *, is_embedding: bool = False) -> Script:
        """Begin to play one choice of a task, unless its script refuses it, and return the script.

        end: index after the last token of this leg; None: all tokens.
        """
        script = self.script(task)
        if not script.refuse:
            leg = self._play_embedding(task, script) if is_embedding else self._play(task, script, end)
            self._legs[task.request_id, task.attempt, task.choice] = self._tasks.spawn(
                leg, f"{self._name} plays {task.request_id}"
            )
        return script

    def cancel(self, request: pb.CancelRequest) -> None:
        """Stop a choice's attempts up to the given one."""
        for (request_id, attempt, choice), leg in self._legs.items():
            if (request_id, choice) == (request.request_id, request.choice) and attempt <= request.attempt:
                leg.cancel()

    async def close(self) -> None:
        """Stop all legs."""
        await self._tasks.close(0.0)

    async def _play(self, task: pb.Task, script: Script, end: int | None) -> None:
        total = min(len(script.tokens), task.sampling.max_tokens)
        stop = total if end is None else min(end, total)
        index = task.first_index
        while index < stop:
            if await self._is_ended_at(index, task, script):
                return
            size = 1 if script.has_event_in(index, script.tokens_per_step) else script.tokens_per_step
            chunk = script.tokens[index : min(index + size, stop)]
            if script.gap_at != index:
                self._stream.send(token_entry(task, script, index, chunk, total))
            index += len(chunk)

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
            self._stream.send(error_entry(task, script))
            return True
        return False
