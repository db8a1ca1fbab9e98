"""Clients that waste the event loop's time wait for each other, and other clients do not wait."""

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import given

from serving.penalties import ADDRESS_SECONDS, ALLOWANCE_SECONDS, MEMORY_SECONDS, SHARE, Penalties, Probation
from tests.clock import Clock

BAD, GOOD = "127.0.0.66", "127.0.0.1"
MUCH = 1000.0
"""Wasted seconds after which a turn never comes within a test."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_an_address_waits_once_the_account_is_overdrawn(clock: Clock) -> None:
    penalties = Penalties(clock)
    penalties.note(BAD, ALLOWANCE_SECONDS)
    assert not penalties.is_due(BAD)
    penalties.note(BAD, 0.001)
    assert penalties.is_due(BAD)
    assert not penalties.is_due(GOOD)


def test_an_address_that_wastes_little_does_not_wait_for_others(clock: Clock) -> None:
    penalties = Penalties(clock)
    penalties.note(BAD, MUCH)
    penalties.note(GOOD, ADDRESS_SECONDS * 0.99)
    assert not penalties.is_due(GOOD)
    penalties.note(GOOD, ADDRESS_SECONDS * 0.02)
    assert penalties.is_due(GOOD)


def test_time_fills_the_account_and_no_further_than_the_allowance(clock: Clock) -> None:
    penalties = Penalties(clock)
    clock.now += 10_000
    penalties.note(BAD, ALLOWANCE_SECONDS + 0.3)
    clock.now += 0.3 / SHARE * 0.99
    assert penalties.is_due(BAD)
    clock.now += 0.3 / SHARE * 0.02
    assert not penalties.is_due(BAD)


def test_an_address_is_forgotten_after_a_while(clock: Clock) -> None:
    penalties = Penalties(clock)
    penalties.note(BAD, MUCH)
    clock.now += MEMORY_SECONDS - 0.1
    assert penalties.is_due(BAD)
    clock.now += 0.2
    assert not penalties.is_due(BAD)
    penalties.note(BAD, ADDRESS_SECONDS / 2)
    assert not penalties.is_due(BAD)


def test_what_is_refunded_was_not_wasted(clock: Clock) -> None:
    penalties = Penalties(clock)
    penalties.note(GOOD, MUCH)
    penalties.note(BAD, MUCH)
    penalties.refund(GOOD, MUCH)
    assert not penalties.is_due(GOOD)
    assert penalties.is_due(BAD)
    penalties.refund(BAD, 2 * MUCH)
    penalties.note(BAD, ALLOWANCE_SECONDS + 0.001)  # no refund fills the account beyond the allowance
    penalties.note(BAD, 2 * MUCH)
    assert penalties.is_due(BAD)


def test_a_late_refund_is_no_credit_for_later_waste(clock: Clock) -> None:
    penalties = Penalties(clock)
    penalties.note(BAD, MUCH)
    clock.now += MEMORY_SECONDS + 1
    penalties.note(BAD, 0.001)
    penalties.refund(BAD, MUCH)
    penalties.note(BAD, ALLOWANCE_SECONDS + 1)
    assert penalties.is_due(BAD)


def test_a_connection_that_was_useful_and_breaks_a_rule_is_wasted_time(clock: Clock) -> None:
    penalties = Penalties(clock)
    number = int(ALLOWANCE_SECONDS / penalties.opening_seconds) // 2 + 1
    for is_due in (False, True):
        for _ in range(number):
            probation = Probation(penalties, BAD)
            probation.end()
            probation.note(MUCH)  # a useful connection may take its time
            probation.fail()
        assert penalties.is_due(BAD) is is_due


def test_the_addresses_kept_are_bounded(clock: Clock) -> None:
    penalties = Penalties(clock)
    for number in range(5000):
        penalties.note(str(number), MUCH)
    assert [penalties.is_due(str(number)) for number in (0, 3975, 3976, 4999)] == [False, False, True, True]


@given(st.lists(st.tuples(st.floats(0.0001, 0.05), st.floats(0, 0.2)), min_size=1, max_size=200))
def test_an_address_that_waits_its_turns_takes_its_share_and_no_more(
    pieces: list[tuple[float, float]],
) -> None:
    """The pause before each piece is that of ``until_turn``; between them the client may rest too."""
    clock = Clock()
    penalties = Penalties(clock)
    begun, wasted, last = clock.now, 0.0, 0.0
    for seconds, rest in pieces:
        if penalties.is_due(BAD):
            clock.now += last / SHARE
        penalties.note(BAD, seconds)
        wasted, last = wasted + seconds, seconds
        clock.now += rest
        elapsed = clock.now - begun
        assert wasted <= ALLOWANCE_SECONDS + SHARE * elapsed + 2 * 0.05 + 1e-9


async def test_turns_come_in_order_and_one_after_another() -> None:
    penalties = Penalties(Clock())
    penalties.note(BAD, ALLOWANCE_SECONDS + 1)
    penalties.note(BAD, 0.001)  # each turn comes after 10 ms, since the clock stands still
    served: list[int] = []

    async def one(number: int) -> None:
        await penalties.until_turn(BAD)
        served.append(number)

    turns = [asyncio.create_task(one(number)) for number in range(6)]
    await asyncio.sleep(0)
    turns[2].cancel()
    await asyncio.wait(turns)
    assert served == [0, 1, 3, 4, 5]


async def test_a_refund_ends_a_wait() -> None:
    penalties = Penalties(Clock())
    penalties.note(BAD, MUCH)
    turn = asyncio.create_task(penalties.until_turn(BAD))
    await asyncio.sleep(0.01)
    assert not turn.done()
    penalties.refund(BAD, MUCH)
    async with asyncio.timeout(20):
        await turn


async def test_a_refund_of_another_address_does_not_end_a_wait() -> None:
    penalties = Penalties(Clock())
    penalties.note(BAD, MUCH)
    penalties.note(GOOD, 0.001)
    turn = asyncio.create_task(penalties.until_turn(BAD))
    await asyncio.sleep(0.01)
    penalties.refund(GOOD, 0.001)
    await asyncio.sleep(0.01)
    assert not turn.done()
    turn.cancel()
    await asyncio.wait({turn})
