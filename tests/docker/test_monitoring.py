"""The profile monitoring on a real engine: Prometheus finds every process by name, and every panel has data.

Prometheus is Debian's, in an image of the tests. Grafana is left out.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from autoscaler.timing_model import write_timing
from tests.autoscaler.cases import TIMING
from tests.chaos.settings import chaos_rng
from tests.chaos.steady import steady_answers
from tests.docker.composed import written
from tests.docker.loaded import COMPARABLE, SMALL_POOLS, client_of, load_during, scaled, until_async
from tests.docker.stack import BUILD_SECONDS, Stack, docker, require_engine, running_stack, socket_variables
from tests.monitoring.panels import panels_with_data
from tests.monitoring.prometheus import Prometheus

pytestmark = [pytest.mark.docker, pytest.mark.timeout(2400)]

IMAGE = "kvbaton-test-prometheus"
DOCKERFILE = Path(__file__).with_name("prometheus.Dockerfile")
WITHOUT_GRAFANA = "services: {grafana: {profiles: !override [never]}}\n"
INTERVAL = "20s"
"""Four scrapes, as in Grafana."""
NUM_CLIENTS = 2
NO_GOAL_MS = "600000"
"""A goal that one decode worker reaches under the load of the test, however slow the machine is."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    require_engine()
    build = ("build", "-q", "-f", str(DOCKERFILE), "-t", IMAGE, str(DOCKERFILE.parent))
    docker(*build, timeout_seconds=BUILD_SECONDS)
    folder = tmp_path_factory.mktemp("compose")
    write_timing(folder / "timing.json", TIMING)
    goals = ("--ttft-goal-ms", NO_GOAL_MS, "--itl-goal-ms", NO_GOAL_MS)
    timing = ("--timing", str(folder / "timing.json"))
    path = written(folder, "--autoscale", "--prefill", "1", "--decode", "1:2", *timing, *goals)
    override = folder / "without_grafana.yaml"
    override.write_text(WITHOUT_GRAFANA)
    variables = (
        "COMPOSE_PROFILES=cpu,monitoring",
        f"COMPOSE_FILE={path}:{override}",
        f"PROMETHEUS_IMAGE={IMAGE}",
        "PROMETHEUS_PORT=0",
        *socket_variables(),
    )
    with running_stack(*COMPARABLE, SMALL_POOLS, *variables) as running:
        yield running


@asynccontextmanager
async def prometheus_of(stack: Stack) -> AsyncIterator[Prometheus]:
    async with aiohttp.ClientSession() as session:
        yield Prometheus(f"http://{stack.published(9090, service='prometheus')}", session)


async def test_every_panel_has_data_while_clients_are_answered(stack: Stack) -> None:
    """The clients use HTTP and gRPC. All rules can be evaluated, and no alert fires."""
    rng = chaos_rng("docker, monitoring")
    [decode] = stack.containers("decode")
    empty: list[str] = []

    async def all_have_data() -> bool:
        found = panels_with_data(prometheus, f"decode-{decode[:12]}", INTERVAL)
        empty[:] = [
            query async for panel, query, has_data in found if not (has_data or panel.is_empty_at_rest)
        ]
        return not empty

    async def seen() -> None:
        try:
            await until_async(all_have_data)
        except TimeoutError as error:
            raise AssertionError(f"no data: {empty}") from error

    async with client_of(stack) as client, prometheus_of(stack) as prometheus:
        references = await steady_answers(client, rng, 10, answers=(20, 160))
        outcome = await load_during([client], references, rng, seen, num_clients=NUM_CLIENTS)
        groups = (await prometheus.get("rules"))["groups"]
        targets = (await prometheus.get("targets", state="active"))["activeTargets"]
    assert (outcome.wrong, outcome.errors) == ([], [])
    rules = [rule for group in groups for rule in group["rules"]]
    assert rules
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []
    assert {target["health"] for target in targets} == {"up"}


async def test_workers_are_scraped_from_their_first_to_their_last_minute(stack: Stack) -> None:
    """One that is added by hand is found by the name that all workers have; one that has left is no target any more."""
    async with prometheus_of(stack) as prometheus:

        async def are_scraped(num_workers: int) -> bool:
            found = await prometheus.query('up{job="kvbaton-worker"}')
            return [each["value"][1] for each in found] == ["1"] * num_workers

        assert await are_scraped(2)
        await scaled(stack, decode=2)
        await until_async(lambda: are_scraped(3))
        await scaled(stack, decode=1)
        await until_async(lambda: are_scraped(2))
