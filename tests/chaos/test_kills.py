"""Workers are killed under load, one after the other: every stream equals the undisturbed run's, and none fails."""

from pathlib import Path

import pytest

from tests.chaos.kills import run_kills
from tests.chaos.settings import chaos_rng, drawn_transports

SECONDS = 18.0

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]


@pytest.mark.parametrize("transport", drawn_transports())
async def test_killed_workers_change_no_stream(tmp_path: Path, transport: str) -> None:
    rng = chaos_rng(f"kills over {transport}")
    report = await run_kills(
        tmp_path,
        rng,
        transport=transport,
        seconds=SECONDS,
        num_streams=12,
        num_questions=12,
        longest_answer=250,
    )
    assert (report.wrong, report.failed) == ([], [])
    assert sum(report.num_kills.values()) > 0
    assert report.num_whole > 0
