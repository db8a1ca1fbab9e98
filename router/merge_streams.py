"""Several answers of one request, carried at the same time."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from router.answer import Delta
from router.tasks import cooperatively

_News = asyncio.Queue[Delta | Exception | None]


async def merge_streams(answers: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Their deltas as they come, each with its answer's place as ``index``. Raises what ends the first one that fails.

    Whoever does not read holds all of them up; whoever closes this, or is cancelled, ends them all.
    """
    news: _News = asyncio.Queue(maxsize=1)
    tasks: list[asyncio.Task[None]] = []
    beginning = asyncio.create_task(_begin(answers, news, tasks))
    num_open = len(answers)
    try:
        while num_open:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        await _end([beginning])
        await _end(tasks)


async def _begin(
    answers: Sequence[AsyncGenerator[Delta, None]], news: _News, tasks: list[asyncio.Task[None]]
) -> None:
    async for index, answer in cooperatively(enumerate(answers)):
        tasks.append(asyncio.create_task(_carry(index, answer, news)))


async def _carry(index: int, answer: AsyncGenerator[Delta, None], news: _News) -> None:
    try:
        async with aclosing(answer):
            async for delta in answer:
                delta.index = index
                await news.put(delta)
    except Exception as error:  # noqa: BLE001 - merge_streams raises it
        await news.put(error)
    else:
        await news.put(None)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel the tasks, those that wait in line before those that hold a worker, which would let them begin."""
    left = iter(reversed(tasks))
    try:
        async for task in cooperatively(left):
            task.cancel()
    finally:
        for task in left:
            task.cancel()
    if tasks:
        await asyncio.wait(tasks)
