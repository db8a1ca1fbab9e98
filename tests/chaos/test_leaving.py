"""Clients disconnect in every phase of a request; afterwards each process holds nothing and has not grown."""

from pathlib import Path

import pytest

from tests.chaos.leaving import run_leaving
from tests.chaos.settings import chaos_rng, drawn_transports

NUM_STREAMS = 20

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]


@pytest.mark.parametrize("transport", drawn_transports())
async def test_everything_is_free_after_clients_have_disconnected(tmp_path: Path, transport: str) -> None:
    rng = chaos_rng(f"leaving over {transport}")
    report = await run_leaving(tmp_path, rng, transport=transport, num_streams=NUM_STREAMS, num_questions=12)
    assert report.wrong == []
    assert report.num_left > 0
    assert report.num_whole > 0
