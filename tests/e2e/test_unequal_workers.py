"""Workers that are not alike, as single processes: what a plan bridges is served, what none bridges is refused."""

import asyncio
import re
from pathlib import Path

import pytest

from contract.errors import UnavailableError
from contract.identity import Role
from tests.chaos.books import count, read_metrics
from tests.chaos.fleet import ROUTER, Fleet, running_fleet
from tests.e2e.prompts import golden_requests
from tests.e2e.references import offline_answers
from tests.service import generate_all

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


async def sum_of(fleet: Fleet, name: str, counter: str) -> float:
    return count([await read_metrics(fleet.facts[name]["admin"])], counter)


@pytest.mark.parametrize("transport", ["nixl", "nccl"])
async def test_other_block_sizes_give_the_same_tokens(
    tmp_path: Path, demo_model: Path, transport: str
) -> None:
    """Blocks of 32 tokens are cut into ones of 16 on the way; a worker with blocks of 24 is refused by name."""
    requests = [request for requests in golden_requests() for request in requests[:12]]
    async with running_fleet(tmp_path) as fleet:
        async with asyncio.TaskGroup() as tasks:
            for name, role, size in (("prefill-0", Role.PREFILL, 32), ("decode-0", Role.DECODE, 16)):
                tasks.create_task(fleet.start_worker(name, role, block_size=size, transport=transport))
        await fleet.until_serving()
        answers = await generate_all(fleet.facts[ROUTER]["grpc"], requests, 8)
        assert await sum_of(fleet, "decode-0", "kvbaton_transfer_converted_blocks_total") > 0
        assert await sum_of(fleet, ROUTER, "kvbaton_request_replays_total") == 0
        with pytest.raises(UnavailableError):
            await fleet.start_worker("decode-1", Role.DECODE, block_size=24, transport=transport)
        log = (tmp_path / "decode-1.log").read_text()
        assert re.search(r"block_size: ours is 24, the peer's is (16|32) \(neither is a multiple", log)
    assert [answer.token_ids for answer in answers] == await offline_answers(demo_model, requests)
