"""A compose stack whose autoscaler starts and removes containers, on a real engine: no answer fails and no token changes."""

import asyncio
from collections.abc import Iterator

import pytest

from autoscaler.timing_model import PrefillTiming, StepTiming, TimingModel, TransferTiming, write_timing
from tests.chaos.settings import chaos_rng
from tests.chaos.steady import steady_answers
from tests.docker.composed import written
from tests.docker.loaded import (
    COMPARABLE,
    SMALL_POOLS,
    attached,
    client_of,
    load_during,
    router_states,
    until,
)
from tests.docker.stack import PROJECT, Stack, admin_page, docker, living, running_stack, socket_variables
from tests.service import counter

pytestmark = [pytest.mark.docker, pytest.mark.timeout(2400)]

NO_GOAL_MS = "600000"
SLOW = TimingModel(
    description="such slow workers that eight clients need two of each role, and one that pauses needs one",
    prefill=PrefillTiming(base_seconds=6.0, seconds_per_token=0.0),
    decode=(StepTiming(base_seconds=0.2, seconds_per_context_token=0.0, seconds_per_answer=0.0),),
    transfer=TransferTiming(base_seconds=0.0, seconds_per_token=0.0),
    kv_tokens=60_000,
    max_answers=4,
    start_seconds=60.0,
)
"""The goals are so wide that the numbers follow from the rate of requests alone."""
SHRINK_SECONDS = 900


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("compose")
    timing = folder / "timing.json"
    write_timing(timing, SLOW)
    goals = ("--ttft-goal-ms", NO_GOAL_MS, "--itl-goal-ms", NO_GOAL_MS)
    flags = ("--autoscale", "--prefill", "1:2", "--decode", "1:2", "--timing", str(timing))
    path = written(folder, *flags, *goals)
    variables = (f"COMPOSE_FILE={path}", *socket_variables())
    with running_stack(*COMPARABLE, SMALL_POOLS, *variables) as running:
        yield running


def pools(stack: Stack) -> tuple[int, int]:
    """Return the numbers of running containers of both roles."""
    return len(stack.containers("prefill")), len(stack.containers("decode"))


def healthy(stack: Stack) -> bool:
    """Return whether the autoscaler decides."""
    (state,) = (container["State"] for container in stack.inspect("autoscaler"))
    return bool(state["Health"]["Status"] == "healthy")


async def test_pools_grow_with_the_load_and_shrink_after_it(stack: Stack) -> None:
    """The autoscaler is killed and started again between both; the new one neither adds nor forgets a container."""
    rng = chaos_rng("docker, autoscaling")
    assert pools(stack) == (1, 1)
    first = {container["Id"] for container in stack.inspect("prefill", "decode")}
    async with client_of(stack) as client:
        references = await steady_answers(client, rng, 10, answers=(100, 300))

        async def grown() -> None:
            await until(lambda: pools(stack) == (2, 2))
            await until(lambda: attached(router_states(stack)[0]) == 4)
            await asyncio.to_thread(stack.compose, "restart", "--timeout", "0", "autoscaler")
            await until(lambda: healthy(stack))

        busy = await load_during([client], references, rng, grown)
        assert pools(stack) == (2, 2)
        check_copies(stack, first)

        async def shrunk() -> None:
            await until(lambda: pools(stack) == (1, 1), SHRINK_SECONDS)

        quiet = await load_during([client], references, rng, shrunk, num_clients=1, pause_seconds=60)
    for outcome in (busy, quiet):
        assert (outcome.wrong, outcome.errors) == ([], [])
    [page] = [admin_page(router, "/metrics") for router in stack.containers("router")]
    assert counter([page], "kvbaton_drains_total", result="empty") == 2
    ended = [container for container in stack.inspect() if not container["State"]["Running"]]
    assert [container["Config"]["Labels"]["com.docker.compose.service"] for container in ended] == ["secret"]


def check_copies(stack: Stack, first: set[str]) -> None:
    """Assert that each new container differs from the first one of its service in nothing but its names and its place."""
    for service in ("prefill", "decode"):
        both = stack.inspect(service)
        assert len(both) == 2
        [made] = [container for container in both if container["Id"] not in first]
        [origin] = [container for container in both if container["Id"] in first]
        assert made["Name"] == f"/{PROJECT}-{service}-2"
        assert made["HostConfig"] == origin["HostConfig"]
        own = {"Hostname", "Image", "Labels"}
        configs = [
            {key: value for key, value in container["Config"].items() if key not in own}
            for container in (made, origin)
        ]
        assert configs[0] == configs[1]
        assert made["Image"] == origin["Image"]
        mounts = [
            sorted((mount["Type"], mount["Destination"], mount["RW"]) for mount in container["Mounts"])
            for container in (made, origin)
        ]
        assert mounts[0] == mounts[1]


async def test_a_container_that_is_killed_comes_back_and_is_not_replaced(stack: Stack) -> None:
    """The engine restarts it, and the autoscaler counts it as one that starts."""
    [decode] = stack.containers("decode")
    docker("exec", decode, "sh", "-c", "kill -9 -1")
    await until(lambda: attached(router_states(stack)[0]) == 2)
    assert stack.containers("decode") == [decode]


async def test_down_leaves_nothing(stack: Stack) -> None:
    """The autoscaler is stopped first, so that it does not start workers while they are taken down."""
    processes = await asyncio.to_thread(stack.processes)
    assert processes
    await asyncio.to_thread(stack.down)
    assert stack.leftovers() == {}
    assert living(processes) == set()
