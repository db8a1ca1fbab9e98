"""Workers with different layouts, as single processes: layouts that a plan converts are served, others rejected."""

import asyncio
import re
from pathlib import Path

import psutil
import pytest

from contract.errors import UnavailableError
from contract.identity import Role
from engine.distributed import rank_program
from tests.chaos.fleet import ROUTER, Fleet, running_fleet
from tests.chaos.held_resources import count, read_metrics, until_free
from tests.e2e.prompts import golden_requests
from tests.e2e.references import offline_answers
from tests.service import generate_all

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

CONVERTED = "kvbaton_transfer_converted_blocks_total"
"""Counts blocks that were split on the way: those of prefill-0, not of prefill-1."""


async def sum_of(fleet: Fleet, name: str, counter: str) -> float:
    return count([await read_metrics(fleet.facts[name]["admin"])], counter)


@pytest.mark.parametrize("transport", ["nixl", "nccl"])
async def test_different_block_sizes_give_the_same_tokens(
    tmp_path: Path, demo_model: Path, transport: str
) -> None:
    """Blocks of 32 tokens are split into blocks of 16 on the way; a worker with blocks of 24 is rejected by name."""
    requests = [request for requests in golden_requests() for request in requests[:12]]
    async with running_fleet(tmp_path) as fleet:
        async with asyncio.TaskGroup() as tasks:
            for name, role, size in (("prefill-0", Role.PREFILL, 32), ("decode-0", Role.DECODE, 16)):
                tasks.create_task(fleet.start_worker(name, role, block_size=size, transport=transport))
        await fleet.until_serving()
        answers = await generate_all(fleet.facts[ROUTER]["grpc"], requests, 8)
        assert await sum_of(fleet, "decode-0", CONVERTED) > 0
        assert await sum_of(fleet, ROUTER, "kvbaton_request_replays_total") == 0
        with pytest.raises(UnavailableError):
            await fleet.start_worker("decode-1", Role.DECODE, block_size=24, transport=transport)
        log = (tmp_path / "decode-1.log").read_text()
        assert re.search(r"block_size: ours is 24, the peer's is (16|32) \(neither is a multiple", log)
    assert [answer.token_ids for answer in answers] == await offline_answers(demo_model, requests)


def ranks_of(fleet: Fleet, name: str) -> list[psutil.Process]:
    """Return the rank processes of a worker, in rank order."""
    below = psutil.Process(fleet.children[name].pid).children(recursive=True)
    ranks = [process for process in below if any(rank_program.__name__ in part for part in process.cmdline())]
    return sorted(ranks, key=lambda process: process.pid)


async def until_more_has_arrived(fleet: Fleet, name: str, before: float) -> None:
    """Wait until more converted blocks have arrived at this worker, so that it and its sender are busy."""
    async with asyncio.timeout(60):
        while await sum_of(fleet, name, CONVERTED) <= before:
            await asyncio.sleep(0.01)


async def test_different_numbers_of_ranks_give_the_same_tokens(tmp_path: Path, demo_model: Path) -> None:
    """Two ranks hand over to one and to two, with other blocks; then a rank of each is killed, and no answer differs."""
    requests = [request for requests in golden_requests() for request in requests[:24]]
    before, after = requests[0::2], requests[1::2]
    async with running_fleet(tmp_path) as fleet:
        async with asyncio.TaskGroup() as tasks:
            for name, role, ranks, size in (
                ("prefill-0", Role.PREFILL, 2, 32),
                ("decode-0", Role.DECODE, 1, 16),
                ("decode-1", Role.DECODE, 2, 16),
            ):
                tasks.create_task(
                    fleet.start_worker(
                        name, role, block_size=size, tensor_parallel_size=ranks, max_num_seqs=8
                    )
                )
        await fleet.until_serving()
        address = fleet.facts[ROUTER]["grpc"]
        answers = await generate_all(address, before, 8)
        for name in ("decode-0", "decode-1"):
            assert await sum_of(fleet, name, CONVERTED) > 0
        assert await sum_of(fleet, ROUTER, "kvbaton_request_replays_total") == 0
        await until_free(fleet.states)

        await fleet.start_worker("prefill-1", Role.PREFILL, transport="tcp")
        arrived = await sum_of(fleet, "decode-1", CONVERTED)
        asking = asyncio.create_task(generate_all(address, after, 24))
        await until_more_has_arrived(fleet, "decode-1", arrived)
        for name, rank in (("prefill-0", 1), ("decode-1", 0)):
            ranks_of(fleet, name)[rank].kill()
            assert await asyncio.wait_for(fleet.children[name].wait(), 60) != 0
            del fleet.facts[name]
        answers += await asking
        await until_free(fleet.states)
        assert await sum_of(fleet, ROUTER, "kvbaton_request_replays_total") > 0
    assert [answer.token_ids for answer in answers] == await offline_answers(demo_model, before + after)
