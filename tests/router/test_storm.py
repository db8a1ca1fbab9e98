"""Deaths, errors, refusals, and clients that leave at any instant, all at once: every answer is whole, nothing is left."""

import asyncio
import logging
import random
from contextlib import suppress

import pytest

from contract.errors import DeadlineError, OverloadedError, TransferError
from contract.identity import Role
from protos import worker_pb2 as pb
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.test_ends import TEXT, TOKENS, nothing_is_left
from tests.router.test_replay import ANSWER

ROLES = {f"{role.value}-{number}": role for role in (*PAIR, Role.AGGREGATED) for number in range(2)}
CREDIT = pb.Credit(max_requests=4, max_tokens=400)


def trouble(dice: random.Random) -> Script:
    """One leg's fate."""
    at = dice.randrange(len(TOKENS))
    match dice.randrange(12):
        case 0:
            return Script(tokens=TOKENS, die_at=at)
        case 1:
            return Script(tokens=TOKENS, fail_at=at, error=TransferError("torn"))
        case 2:
            return Script(tokens=TOKENS, refuse=OverloadedError("no room"))
        case 3:
            return Script(tokens=TOKENS, fail_at=at, error=DeadlineError("too late"))
        case _:
            return Script(tokens=TOKENS, token_delay_seconds=dice.random() * 0.01)


async def revive(cluster: Cluster, dice: random.Random) -> None:
    """Start every worker that has died again, under its old name."""
    while True:
        state = await cluster.until(lambda state: len(state["workers"]) < len(ROLES))
        alive = {worker["worker_id"] for worker in state["workers"]}
        name = dice.choice(sorted(ROLES.keys() - alive))
        (await cluster.add(ROLES[name], name)).stream.grant(CREDIT)


async def ask(cluster: Cluster, dice: random.Random) -> str | None:
    """The text of one answer; None when its client has left before."""
    body = {"prompt": "x" * dice.randrange(1, 60), "max_tokens": len(TOKENS), "priority": dice.randrange(3)}
    patience = dice.choice([None, None, dice.random() * 0.2])
    with suppress(TimeoutError):
        async with asyncio.timeout(patience):
            status, answer = await cluster.post(TEXT, body)
            return answer["choices"][0]["text"] if status == 200 else str(answer)
    return None


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_a_storm(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    dice = random.Random(seed)
    async with running_cluster(
        lambda _: trouble(dice), (), max_replays=1000, max_worker_deaths=1000, worker_wait_seconds=60
    ) as cluster:
        for name, role in ROLES.items():
            (await cluster.add(role, name)).stream.grant(CREDIT)
        await cluster.service.wait_ready()
        async with asyncio.timeout(60):
            reviving = asyncio.create_task(revive(cluster, dice))
            answers = await asyncio.gather(*(ask(cluster, dice) for _ in range(60)))
            reviving.cancel()
            await asyncio.wait([reviving])
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert {answer for answer in answers if answer is not None} == {ANSWER}
        await cluster.until(lambda state: not any(state["requests"].values()) and not state["num_tasks"])
        assert (await cluster.debug_state())["num_in_line"] == 0
        await nothing_is_left(cluster)
