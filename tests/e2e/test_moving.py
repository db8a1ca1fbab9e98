"""Answers move between real workers while they are decoded, and are what they are undisturbed."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from contract.identity import Role
from kv_transfer.options import TransportName
from router.migration.migration import MigrationState
from router.migration.migrator import Migrator
from router.telemetry.metrics import RouterMetrics
from tests.chaos.models import DEMO, RECURRENT, WINDOWS, ChaosModel
from tests.e2e.cells import COMPLETION, STREAMED, ask_streamed, comparable
from tests.e2e.in_process import LocalService, running_in_process
from tests.e2e.test_cells import check_same
from tests.service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FORMS: list[tuple[list[Role], TransportName]] = [
    ([Role.PREFILL, Role.DECODE, Role.DECODE], "tcp"),
    ([Role.AGGREGATED, Role.AGGREGATED], "shm"),
]
MIN_MOVES = 3 * len(STREAMED)


async def move_to_and_fro(service: LocalService, until: "asyncio.Task[Any]") -> Counter[MigrationState]:
    """Move all answers from one worker that decodes to another, and back, until the task is done."""
    path = service.router._path
    migrator = Migrator(path.registry, path.runs, RouterMetrics().moves)
    names = [each.worker.identity.worker_id for each in service.workers]
    sources = [path.registry.get(name) for name in names if not name.startswith("prefill")]
    results = Counter[MigrationState]()
    while not until.done():
        for source in sources:
            results += await migrator.move_all(source, list(path.runs.open_runs))
        await asyncio.sleep(
            0.001
        )  # the engines of this process, and their compilers of grammars, need the interpreter too
    return results


async def until_free(service: LocalService) -> None:
    """Wait until no worker holds a request, a block or a lease. A release crosses the link after the last token."""
    async with asyncio.timeout(30):
        for local in service.workers:
            while True:
                state = await local.worker.debug_state()
                blocks = state["blocks"]
                if not (blocks["held"] or blocks["quarantined"] or state["leases"] or state["requests"]):
                    break
                await asyncio.sleep(0.01)
            await local.worker.engine.call("check_integrity")


@pytest.mark.parametrize("model", [DEMO, RECURRENT, WINDOWS], ids=lambda model: model.name)
async def test_answers_that_move_are_the_same(tmp_path: Path, model: ChaosModel) -> None:
    """Two answers of one prompt, seeded, with log probabilities: each moves several times, with its states or windows."""
    body = {
        "prompt": "The old moose sat near",
        "max_tokens": 80,
        "n": 2,
        "seed": 10,
        "temperature": 1.4,
        "logit_bias": {"1": -100},
        "logprobs": 1,
    }
    (roles, transport) = FORMS[0]
    async with running_in_process(tmp_path, model.folder(tmp_path), roles, transport) as service:
        expected = await post(service, body)
        asking = asyncio.create_task(post(service, body))
        results = await move_to_and_fro(service, asking)
        check_same({"n": await asking}, {"n": expected}, "moved to and fro")
        await until_free(service)
    assert results[MigrationState.MOVED] >= 6, results
    assert not results[MigrationState.REPLAYED], results


async def post(service: LocalService, body: dict[str, Any]) -> dict[str, Any]:
    """Return the choices of a completion."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{service.http}{COMPLETION}", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        return comparable(await response.json())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("roles", "transport"), FORMS, ids=[f"{roles[-1].value} over {transport}" for roles, transport in FORMS]
)
async def test_every_feature_answers_equally_while_all_answers_move(
    tmp_path: Path, demo_model: Path, roles: list[Role], transport: TransportName
) -> None:
    """Sampling, grammars, penalties, log probabilities, stop strings, tools and several choices, moved again and again."""
    async with running_in_process(tmp_path, demo_model, roles, transport) as service:
        asked = cast(Service, service)  # what is asked needs the address only
        expected = await ask_streamed(asked)
        asking = asyncio.create_task(ask_streamed(asked))
        results = await move_to_and_fro(service, asking)
        check_same(await asking, expected, "moved to and fro")
        await until_free(service)
    assert results[MigrationState.MOVED] >= MIN_MOVES, results
    assert not results[MigrationState.REPLAYED], results
