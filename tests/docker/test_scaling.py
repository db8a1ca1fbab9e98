"""A compose stack that is scaled while it serves, on a real engine: no answer fails and no token changes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.settings import chaos_rng
from tests.chaos.steady import steady_answers
from tests.docker.loaded import (
    COMPARABLE,
    SMALL_POOLS,
    attached,
    client_of,
    load_during,
    router_states,
    scaled,
    until,
)
from tests.docker.stack import Stack, admin_page, debug_state, running_stack, watched_exits
from tests.service import counter

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack(*COMPARABLE, SMALL_POOLS) as running:
        yield running


async def test_scaling_out_and_in_loses_nothing(stack: Stack, tmp_path: Path) -> None:
    """From one decode worker to three and back, under load.

    All three are used. Two leave empty, long before they would be killed, and their answers move.
    """
    rng = chaos_rng("docker, scaling")

    async def out_and_in() -> None:
        await scaled(stack, decode=3)
        await until(lambda: attached(router_states(stack)[0]) == 4)
        await until(lambda: all(debug_state(each)["num_accepted"] for each in stack.containers("decode")))
        await scaled(stack, decode=1)
        await until(lambda: exit_codes() == [0, 0])

    async with client_of(stack) as client:
        # They last longer than it takes to move one; shorter ones have ended instead, in all moves of a scaling in.
        references = await steady_answers(client, rng, 10, answers=(400, 600))
        with watched_exits("decode", tmp_path) as exit_codes:
            outcome = await load_during([client], references, rng, out_and_in)
    assert (outcome.wrong, outcome.errors) == ([], [])
    assert len(stack.containers("decode")) == 1
    [page] = [admin_page(container, "/metrics") for container in stack.containers("router")]
    assert counter([page], "kvbaton_drains_total", result="empty") == 2
    assert counter([page], "kvbaton_migrations_total", result="moved") > 0


async def test_a_second_router_comes_and_goes(stack: Stack, tmp_path: Path) -> None:
    """The workers find it by the name that both have, divide their credit, and give the other one all of it again."""
    rng = chaos_rng("docker, routers")
    async with client_of(stack) as first:
        references = await steady_answers(first, rng, 10, answers=(20, 160))
        grown = await load_during([first], references, rng, lambda: scaled(stack, router=2))
        await until(lambda: [attached(state) for state in router_states(stack)] == [2, 2])
        async with client_of(stack, 2) as second:

            async def both_have_answered() -> None:
                await until(lambda: all(sum(state["requests"].values()) for state in router_states(stack)))

            shared = await load_during([first, second], references, rng, both_have_answered)
        with watched_exits("router", tmp_path) as exit_codes:
            shrunk = await load_during([first], references, rng, lambda: scaled(stack, router=1))
            await until(lambda: exit_codes() == [0])
    for outcome in (grown, shared, shrunk):
        assert (outcome.wrong, outcome.errors) == ([], [])
    workers = stack.containers("prefill") + stack.containers("decode")
    await until(lambda: all(len(debug_state(worker)["routers"]) == 1 for worker in workers))
