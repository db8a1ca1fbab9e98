"""The memory of a router of its workers: their restarts, and the sizes of lost ones."""

import random

import pytest

from contract.identity import Role
from contract.membership import Registration
from router.workers.registry import WorkerMemory
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.text.tiny_model import END

SAY = Script(tokens=[END])


def boot(name: str, boot_id: str, num_restarts: int = 0) -> Registration:
    return Registration(worker_id=name, boot_id=boot_id, role="decode", num_restarts=num_restarts)


def test_another_boot_id_is_a_restart_and_the_same_one_is_not() -> None:
    memory = WorkerMemory()
    assert memory.on_attach(boot("w", "a")) == 0
    assert memory.on_attach(boot("w", "a")) == 0, "it has lost its stream only"
    assert memory.on_attach(boot("w", "b")) == 1
    assert memory.on_attach(boot("w", "a")) == 2
    assert memory.on_attach(boot("v", "c")) == 0
    assert memory.restarts == {"decode": 2}


def test_restarts_that_no_router_saw_are_those_of_the_supervisor() -> None:
    """A worker that ends before it attaches, four times in a row, was not seen in between."""
    memory = WorkerMemory()
    memory.on_attach(boot("w", "a", num_restarts=1))
    assert memory.restarts.get("decode", 0) == 0, "this router was not there"
    assert memory.on_attach(boot("w", "b", num_restarts=5)) == 5
    assert memory.restarts == {"decode": 4}
    assert memory.on_attach(boot("w", "c")) == 6, "a supervisor that was replaced counts from 0"
    assert memory.restarts == {"decode": 5}


@pytest.mark.parametrize("seed", range(20))
def test_the_sum_of_restarts_is_the_growth_of_the_workers_counts(seed: int) -> None:
    rng = random.Random(seed)
    memory, first, last = WorkerMemory(), dict[str, int](), dict[str, int]()
    for _ in range(300):
        name = rng.choice("uvw")
        given = boot(name, rng.choice("abcd"), rng.choice((0, 0, rng.randrange(400))))
        count = memory.on_attach(given)
        assert count >= max(last.get(name, 0), given.num_restarts)
        first.setdefault(name, count)
        last[name] = count
    assert sum(memory.restarts.values()) == sum(last[name] - first[name] for name in last)


def test_names_without_end_do_not_fill_the_memory() -> None:
    memory = WorkerMemory()
    for number in range(9000):
        memory.on_attach(boot(f"pod-{number}", "a"))
    assert memory.on_attach(boot("pod-8999", "b")) == 1
    assert memory.on_attach(boot("pod-0", "b")) == 0, "it was forgotten"


async def test_a_restarted_worker_is_seen_in_the_list_and_in_the_metrics() -> None:
    async with running_cluster(SAY) as cluster:
        await cluster.add(Role.DECODE, "w", host="node-7", age_seconds=90.0)
        await cluster.workers["w"].die()
        await cluster.until(lambda state: len(state["workers"]) == 2)
        await cluster.add(Role.DECODE, "w", host="node-8", age_seconds=2.0)
        async with cluster.session.get(f"http://{cluster.service.addresses.admin}/admin/workers") as response:
            pool = await response.json()
        (worker,) = (worker for worker in pool["workers"] if worker["id"] == "w")
        assert (worker["num_restarts"], worker["host"]) == (1, "node-8")
        assert 2.0 <= worker["age_seconds"] < 60.0
        assert pool["router"]["num_restarts"] == 0 and pool["router"]["age_seconds"] > 0
        metrics = await cluster.metrics()
        assert metrics['kvbaton_worker_restarts_total{pool="decode"}'] == 1
        assert metrics['kvbaton_worker_restarts_total{pool="prefill"}'] == 0


async def test_the_rates_of_a_router_are_those_of_its_last_seconds() -> None:
    async with running_cluster(SAY) as cluster:
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
        for _ in range(5):
            status, _ = await cluster.post("/v1/completions", body)
            assert status == 200
        async with cluster.session.get(f"http://{cluster.service.addresses.admin}/admin/workers") as response:
            router = (await response.json())["router"]
    assert router["requests_per_second"] > 0 and router["tokens_per_second"] >= router["requests_per_second"]
    assert router["errors_per_second"] == router["replays_per_second"] == 0
