"""A pool is changed and broken under mixed load: every answer is that of the undisturbed run."""

from pathlib import Path

import pytest

from tests.chaos.pool.answers import Way
from tests.chaos.pool.events import EVENTS
from tests.chaos.pool.questions import Kind
from tests.chaos.pool.report import PoolReport
from tests.chaos.pool.run import Sizes, running_scene
from tests.chaos.pool.scripts import Disturb, Restart, ScaleIn
from tests.chaos.settings import chaos_rng

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]


async def test_a_pool_that_is_disturbed_restarted_and_shrunk_gives_the_same_answers(tmp_path: Path) -> None:
    """Less than a tenth of ``make chaos``, on one pool; each run has a new seed."""
    rng = chaos_rng("pool")
    async with running_scene(tmp_path, rng, Sizes(2, num_decode=4), 24, 200) as scene:
        disturbed = await scene.run(Disturb(48.0, quiet_seconds=4.0), 32)
        check(disturbed)
        assert len(disturbed.events) >= len(EVENTS) / 2
        assert set(disturbed.num_whole) == set(Kind) and set(disturbed.num_by_way) == set(Way)
        restarted = await scene.run(Restart(8, quiet_seconds=0.0), 8)
        check(restarted)
        shrunk = await scene.run(ScaleIn(quiet_seconds=0.0, every_seconds=1.0), 12)
        check(shrunk)
        assert (len(restarted.exit_seconds), len(shrunk.exit_seconds)) == (8, 3)


def check(report: PoolReport) -> None:
    """Raise AssertionError if an answer was wrong or failed, or something is still held."""
    assert (report.wrong, report.failed, report.leaks) == ([], [], [])
    assert report.num_whole.total() > 0
