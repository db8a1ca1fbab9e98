"""Each write of a stream has a time limit, with one timer for the stream."""

import asyncio

import pytest

from contract.errors import CancelledError
from serving.event_loop import stall_limit


async def test_a_write_that_waits_too_long_ends_the_stream() -> None:
    with pytest.raises(CancelledError, match=r"has read nothing for 0\.05 s"):
        async with stall_limit(0.05) as limit:
            await limit.write(asyncio.sleep(0))
            await limit.write(asyncio.Event().wait())


async def test_only_the_time_of_one_write_counts() -> None:
    """The stream is silent for a while, and its writes take longer than the limit together."""
    async with stall_limit(1.0) as limit:
        await asyncio.sleep(0.7)
        for _ in range(3):
            await limit.write(asyncio.sleep(0.4))


async def test_another_error_is_not_changed() -> None:
    with pytest.raises(TimeoutError, match="mine"):
        async with stall_limit(60.0):
            raise TimeoutError("mine")
