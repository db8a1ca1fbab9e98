"""Places that clients hold while they are waited for."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from contract.errors import OverloadedError
from serving.grpc_messages import FairPlaces


async def hold(places: FairPlaces, client: str, connection: str, has_place: asyncio.Event) -> None:
    """Hold a place until cancelled."""
    async with places.place(client, connection):
        has_place.set()
        await asyncio.Event().wait()


def held_by(places: FairPlaces, client: str, connection: str) -> tuple["asyncio.Task[None]", asyncio.Event]:
    """Start a task that holds a place; return it with the event that is set when it has the place."""
    has_place = asyncio.Event()
    return asyncio.create_task(hold(places, client, connection, has_place)), has_place


@pytest.mark.parametrize(
    ("other", "gets"), [(("b", "1"), True), (("a", "2"), True), (("a", "1"), False)], ids=str
)
async def test_who_holds_less_takes_the_oldest_place_of_who_holds_most(
    other: tuple[str, str], gets: bool
) -> None:
    """Another client, or another connection of the same one; its own calls wait for each other."""
    places = FairPlaces(2, 10)
    holders = [held_by(places, "a", "1") for _ in range(2)]
    for _, has_place in holders:
        await has_place.wait()
    newest, has_place = held_by(places, *other)
    if gets:
        async with asyncio.timeout(10):
            await has_place.wait()
        with pytest.raises(OverloadedError, match="send it again"):
            await holders[0][0]
    else:
        await asyncio.sleep(0.5)
        assert not has_place.is_set()
    assert places.num_held == 2
    for task in (newest, holders[1][0], holders[0][0]):
        task.cancel()
    await asyncio.wait([newest, holders[1][0], holders[0][0]])
    assert places.num_held == 0


async def test_those_that_wait_are_bounded_and_the_crowd_is_refused() -> None:
    """One client cannot fill the queue; its excess calls are rejected, last first."""
    places = FairPlaces(1, 3)
    first, has_place = held_by(places, "a", "1")
    await has_place.wait()
    crowd = [held_by(places, "a", "1")[0] for _ in range(3)]
    await asyncio.sleep(0)
    one_more, _ = held_by(places, "a", "1")
    with pytest.raises(OverloadedError, match="calls are waiting already"):
        await one_more
    other, has_place = held_by(places, "b", "9")
    with pytest.raises(OverloadedError, match="calls are waiting already"):
        await crowd[-1]
    async with asyncio.timeout(10):
        await has_place.wait()
    tasks = [first, *crowd, other]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert places.num_held == 0


@pytest.mark.parametrize("cancel_at", range(4))
async def test_no_place_is_lost_by_a_cancel(cancel_at: int) -> None:
    """A cancellation at any step of waiting and holding releases the place."""
    places = FairPlaces(1, 10)
    async with AsyncExitStack() as held:
        await held.enter_async_context(places.place("a", "1"))
        task, _ = held_by(places, "a", "1")
        for _ in range(cancel_at):
            await asyncio.sleep(0)
        if cancel_at % 2:
            await held.aclose()
        task.cancel()
        await asyncio.wait([task])
    async with asyncio.timeout(10), places.place("b", "2"):
        assert places.num_held == 1
    assert places.num_held == 0
