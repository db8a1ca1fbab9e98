"""One request that kills its workers ends alone; the requests that were beside it are answered."""

import asyncio

import pytest

from contract.identity import Role
from protos import worker_pb2 as pb
from router.routing.policy import PlacementRequest, candidates, place
from router.routing.views import WorkerView, WorkerViews
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.router.test_admission_queue import grant_one
from tests.router.test_ends import TEXT, TOKENS, nothing_is_left
from tests.router.test_replay import ANSWER

KILLER = 7
SUSPECTS = (4, 5, 6)
BYSTANDER = 8


def killing(task: pb.Task) -> Script:
    """The killer's worker dies at its first token, when all requests beside it have one."""
    if task.sampling.seed == KILLER:
        return Script(tokens=TOKENS, die_at=task.first_index, token_delay_seconds=0.1)
    return Script(tokens=TOKENS, token_delay_seconds=0.06)


def dead(cluster: Cluster) -> set[str]:
    return {name for name, worker in cluster.workers.items() if worker.is_dead}


async def replace_dead(cluster: Cluster) -> None:
    """Add another worker of the role for each death, as a supervisor starts it."""
    replaced: set[str] = set()
    while True:
        for name in sorted(dead(cluster) - replaced):
            replaced.add(name)
            role = Role(name.partition("-")[0])
            await cluster.add(role, f"{role.value}-{len(replaced)}")
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("roles", [(Role.AGGREGATED,), (Role.PREFILL, Role.DECODE)])
async def test_a_killer_ends_alone_and_the_requests_beside_it_are_answered(roles: tuple[Role, ...]) -> None:
    """Before, the requests that were beside it at three deaths ended with it."""
    async with running_cluster(killing, roles, worker_wait_seconds=30) as cluster:

        async def ask(seed: int) -> tuple[int, str]:
            status, answer = await cluster.post(TEXT, {"prompt": "x", "seed": seed})
            return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["message"]

        replacing = asyncio.create_task(replace_dead(cluster))
        answers = dict(enumerate(await asyncio.gather(*(ask(seed) for seed in range(8)))))
        replacing.cancel()
        status, message = answers.pop(KILLER)
        assert status == 503
        assert message.startswith("3 workers were lost while they computed this request")
        assert answers == dict.fromkeys(answers, (200, ANSWER))
        assert len(dead(cluster)) <= 3 * len(roles)
        await nothing_is_left(cluster)


class Suspects:
    """Scripts requests of which each has lost two workers, those that stall then, and one that stalls on its first worker.

    num_stalled: so many of the suspects stall. begun: the seeds of those that have begun, in order.
    """

    def __init__(self, num_stalled: int) -> None:
        self.num_stalled = num_stalled
        self.begun: list[int] = []

    def __call__(self, task: pb.Task) -> Script:
        seed = task.sampling.seed
        if seed in SUSPECTS and task.attempt < 2:
            return Script(tokens=TOKENS, die_at=0, token_delay_seconds=0.2)
        if seed in SUSPECTS:
            self.begun.append(seed)
        stalls = seed in self.begun[: self.num_stalled] or (seed == BYSTANDER and task.attempt == 0)
        return Script(tokens=TOKENS, stall_at=1 if stalls else None)


async def ask(cluster: Cluster, seed: int) -> tuple[int, str]:
    status, answer = await cluster.post(TEXT, {"prompt": "x", "seed": seed})
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["message"]


async def ask_suspects(cluster: Cluster, number: int) -> dict[int, asyncio.Task[tuple[int, str]]]:
    """Ask, and let two workers die with all of these requests."""
    asking = {seed: asyncio.create_task(ask(cluster, seed)) for seed in SUSPECTS[:number]}
    await cluster.until(lambda state: state["num_in_line"] == number)
    num_others = len(cluster.workers) - len(dead(cluster))
    for name in ("both-1", "both-2"):
        await cluster.add(Role.AGGREGATED, name)
        await cluster.service.wait_for_workers(num_others)
    return asking


async def until_running(cluster: Cluster, streaming: int, in_line: int) -> None:
    await cluster.until(
        lambda state: (state["requests"]["streaming"], state["num_in_line"]) == (streaming, in_line)
    )


async def test_a_suspect_runs_where_another_one_has_ended_if_its_own_worker_dies_while_it_waits() -> None:
    """Before, it waited until its deadline, and all other suspects with it."""
    script = Suspects(num_stalled=1)
    async with running_cluster(script, (Role.AGGREGATED,), worker_wait_seconds=30) as cluster:
        await grant_one(cluster, "both-0")
        beside = asyncio.create_task(ask(cluster, BYSTANDER))
        await until_running(cluster, 1, 0)
        asking = await ask_suspects(cluster, 2)
        await cluster.add(Role.AGGREGATED, "both-3")
        await until_running(cluster, 2, 1)
        await cluster.workers["both-0"].die()
        async with asyncio.timeout(30):
            assert await beside == (200, ANSWER)
            assert len(script.begun) == 1
            asking.pop(script.begun[0]).cancel()
            (waiting,) = asking.values()
            assert await waiting == (200, ANSWER)
        await nothing_is_left(cluster)


async def test_other_requests_overtake_a_suspect_at_occupied_workers() -> None:
    """One of three suspects waits. A request that came later loses its worker, and continues beside another suspect."""
    script = Suspects(num_stalled=2)
    async with running_cluster(script, (Role.AGGREGATED,), worker_wait_seconds=30) as cluster:
        await cluster.workers["both-0"].die()
        await cluster.service.wait_for_workers(0)
        asking = await ask_suspects(cluster, 3)
        for number in (1, 2):
            await cluster.add(Role.AGGREGATED, f"both-{2 + number}")
            await until_running(cluster, number, 1)
        beside = asyncio.create_task(ask(cluster, BYSTANDER))
        await until_running(cluster, 3, 1)
        for name in ("both-3", "both-4"):
            worker = cluster.workers[name]
            if any(call.task.sampling.seed == BYSTANDER for call in worker.received.decodes):
                await worker.die()
        async with asyncio.timeout(30):
            assert await beside == (200, ANSWER)
            statuses = [(await task)[0] for task in asking.values() if task.done()]
        assert statuses == [503]
        for task in asking.values():
            task.cancel()
        await cluster.until(lambda state: not sum(state["requests"].values()))
        await nothing_is_left(cluster)


def test_a_worker_that_counts_as_full_is_not_chosen_however_idle_it_is() -> None:
    """The replay waits for it, and does not end for lack of workers."""
    idle, busy = (
        WorkerView(
            worker_id=name,
            role=Role.AGGREGATED,
            num_tokens=tokens,
            num_requests=1,
            max_requests=8,
            max_tokens=1000,
        )
        for name, tokens in (("idle", 1), ("busy", 100))
    )
    request = PlacementRequest(num_prompt_tokens=4, num_answer_tokens=4, full=frozenset({"idle"}))
    placement = place(WorkerViews.of([idle, busy]), request, 0)
    assert placement is not None
    assert [leg.worker for leg in placement.legs] == ["busy"]
    assert place(WorkerViews.of([idle]), request, 0) is None
    assert candidates(WorkerViews.of([idle]), request) == {"idle"}
