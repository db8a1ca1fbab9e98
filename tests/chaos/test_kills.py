"""Workers are killed under load, one after the other: every stream equals the undisturbed run's, and none fails."""

from pathlib import Path

import pytest

from tests.chaos.kills import run_kills
from tests.chaos.models import DEMO, RECURRENT, WINDOWS, ChaosModel
from tests.chaos.settings import chaos_rng, drawn_transports, has_seed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]


@pytest.mark.parametrize("transport", drawn_transports())
@pytest.mark.parametrize(
    ("model", "num_each", "seconds"),
    [
        pytest.param(DEMO, 3, 18.0, id="demo"),
        pytest.param(RECURRENT, 2, 12.0, id="recurrent"),
        *([pytest.param(WINDOWS, 2, 12.0, id="windows")] if has_seed() else []),
    ],
)
async def test_killed_workers_change_no_stream(
    tmp_path: Path, model: ChaosModel, num_each: int, seconds: float, transport: str
) -> None:
    rng = chaos_rng(f"kills of {model.name} over {transport}")
    report = await run_kills(
        tmp_path,
        rng,
        transport=transport,
        seconds=seconds,
        model=model,
        num_each=num_each,
        num_streams=12,
        num_questions=12,
        longest_answer=250,
    )
    assert (report.wrong, report.failed) == ([], [])
    assert sum(report.num_kills.values()) > 0
    assert report.num_whole > 0
