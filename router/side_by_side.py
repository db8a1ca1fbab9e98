"""Several answers of one request, carried at the same time."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from router.answer import Delta


async def side_by_side(answers: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Their deltas as they come, each with its answer's place as ``index``. Raises what ends the first one that fails.

    Whoever does not read holds all of them up; whoever closes this, or is cancelled, ends them all.
    """
    news: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(maxsize=1)

    async def carry(index: int, answer: AsyncGenerator[Delta, None]) -> None:
        try:
            async with aclosing(answer):
                async for delta in answer:
                    delta.index = index
                    await news.put(delta)
        except Exception as error:  # noqa: BLE001 - raised by whoever reads
            await news.put(error)
        else:
            await news.put(None)

    tasks = [asyncio.create_task(carry(index, answer)) for index, answer in enumerate(answers)]
    num_open = len(tasks)
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
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
