"""Data-parallel groups under P/D: every answer is that of one engine, and a group that breaks costs no request."""

from pathlib import Path

import pytest

from tests.chaos.groups import run_groups
from tests.chaos.settings import chaos_rng, drawn_transports

NUM_REQUESTS = 200
NUM_ARRIVALS = 1000

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(400)]


@pytest.mark.parametrize("transport", drawn_transports())
async def test_arrivals_at_all_ranks_of_two_groups(tmp_path: Path, transport: str) -> None:
    """E1, E14, E17: the router places requests at ranks as at any worker, and their numbers of passes agree."""
    rng = chaos_rng(f"groups over {transport}")
    flags = ("--data-parallel-size", "2", "--transport", transport)
    report = await run_groups(tmp_path, rng, *flags, num_requests=NUM_ARRIVALS)
    assert report.wrong == []
    assert report.num_whole == NUM_ARRIVALS
    assert report.num_dummy_steps > 0
    assert report.num_calls <= report.num_steps / 4


async def test_a_killed_rank_costs_no_request(tmp_path: Path) -> None:
    """E19: its group ends and starts again; the other group, or the same one later, has the requests."""
    rng = chaos_rng("a killed rank")
    flags = ("--data-parallel-size", "2", "--prefill", "1", "--decode", "2")
    report = await run_groups(tmp_path, rng, *flags, num_requests=NUM_REQUESTS, num_kills=1)
    assert report.wrong == []
    assert (report.num_whole, report.num_kills) == (NUM_REQUESTS, 1)


async def test_a_group_hands_over_to_a_worker_of_another_size(tmp_path: Path) -> None:
    """Two ranks of two processes each compute the prompts, one process decodes."""
    rng = chaos_rng("unequal sides")
    config = tmp_path / "kvbaton.toml"
    config.write_text("[prefill]\ndata_parallel_size = 2\ntensor_parallel_size = 2\n")
    report = await run_groups(tmp_path, rng, "--config", str(config), num_requests=NUM_REQUESTS)
    assert report.wrong == []
    assert report.num_whole == NUM_REQUESTS
