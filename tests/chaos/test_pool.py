"""A pool is changed and broken under mixed load: every answer is that of the undisturbed run."""

from pathlib import Path

import pytest

from tests.chaos.pool.run import Load, Sizes, run_pool
from tests.chaos.pool.scripts import Disturb, Restart, ScaleIn, Script
from tests.chaos.settings import chaos_rng

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]
FEW = Load(num_clients=12, num_questions=18, longest_answer=160)


async def test_a_disturbed_pool_gives_the_same_answers(tmp_path: Path) -> None:
    """A tenth of ``make chaos``; each run has a new seed."""
    report = await run_pool(tmp_path, chaos_rng("pool"), Sizes(2), Disturb(60.0))
    assert (report.wrong, report.failed, report.leaks) == ([], [], [])
    assert report.events.total() >= 5 and all(report.num_whole.values())


@pytest.mark.parametrize(("script", "num_decode"), [(ScaleIn(), 4), (Restart(6), 3)])
async def test_a_pool_shrinks_and_restarts_without_a_failure(
    script: Script, num_decode: int, tmp_path: Path
) -> None:
    sizes = Sizes(2, num_decode=num_decode)
    report = await run_pool(tmp_path, chaos_rng("shrinking pool"), sizes, script, FEW)
    assert (report.wrong, report.failed, report.leaks) == ([], [], [])
    assert report.num_whole.total() > 0 and report.exit_seconds
