"""One request that kills its workers ends alone; the requests that were beside it are answered."""

import asyncio

import pytest

from contract.identity import Role
from protos import worker_pb2 as pb
from router.routing.policy import PlacementRequest, candidates, place
from router.routing.views import WorkerView, WorkerViews
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.router.test_ends import TEXT, TOKENS, nothing_is_left
from tests.router.test_replay import ANSWER

KILLER = 7


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
