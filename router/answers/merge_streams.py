"""Several answers of one request, streamed at the same time."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from router.answers.answer import Delta
from router.concurrency import cooperatively

_Items = asyncio.Queue[Delta | Exception | None]
"""Deltas of all streams; None at the end of a stream."""


def merge_streams(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of all streams as they arrive, each with the place of its stream as ``index``.

    Raises the error of the first stream that fails. A reader that does not read delays all streams; closing or cancelling
    the merged stream ends them all.
    """
    return streams[0] if len(streams) == 1 else _merge(streams)


async def _merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    # one delta: a client that does not read holds up all streams, and their tokens are bounded where they wait
    items: _Items = asyncio.Queue(maxsize=1)
    tasks: list[asyncio.Task[None]] = []
    # in a task of its own: the first deltas are passed on while hundreds of others begin
    starting = asyncio.create_task(_start(streams, items, tasks))
    num_open = len(streams)
    try:
        while num_open:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        await _cancel([*tasks, starting])


async def _start(
    streams: Sequence[AsyncGenerator[Delta, None]], items: _Items, tasks: list[asyncio.Task[None]]
) -> None:
    async for index, stream in cooperatively(enumerate(streams)):
        tasks.append(asyncio.create_task(_forward(index, stream, items)))


async def _forward(index: int, stream: AsyncGenerator[Delta, None], items: _Items) -> None:
    try:
        async with aclosing(stream):
            async for delta in stream:
                delta.index = index
                await items.put(delta)
    except Exception as error:  # noqa: BLE001 - _merge raises it
        await items.put(error)
    else:
        await items.put(None)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel the tasks, last one first: those that hold a worker would let those that wait for it begin.

    A second cancellation of the caller must not spare any of them.
    """
    left = iter(reversed(tasks))
    try:
        async for task in cooperatively(left):
            task.cancel()
    finally:
        for task in left:
            task.cancel()
    if tasks:
        await asyncio.wait(tasks)
