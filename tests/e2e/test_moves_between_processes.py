"""Answers move to and fro between worker processes, as ``python -m benchmarks.moves`` measures it on more of them."""

from pathlib import Path
from typing import cast

import pytest

from benchmarks.moves import Cell, measure_all
from kv_transfer.options import TransportName
from tests.chaos.settings import chaos_seed, drawn_transports

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


async def test_no_token_changes_and_no_block_stays_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tenth of the benchmark's moves, and replays between them, also to busy workers. Times are not compared here.

    A source refuses an answer that has no token left when the order arrives; the log has each reason.
    """
    caplog.set_level("INFO", "router.migration.migrator")
    cells = [Cell(300, 30, 2), Cell(1950, 20, 2), Cell(300, 8, 1, num_others=6)]
    transports = [cast(TransportName, name) for name in drawn_transports()]
    found = await measure_all(tmp_path, cells, transports, chaos_seed())
    assert (found["num_changed_answers"], found["leaks"]) == (0, [])
    assert found["num_moves"] >= 50
    for cell in found["cells"].values():
        assert set(cell["results"]) <= {"moved", "ended", "refused"}, cell
