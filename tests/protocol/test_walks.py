"""Random schedules through larger worlds, with several faults each; a fresh seed in every run, which is printed."""

import pytest

from tests.chaos.settings import chaos_seed
from tests.protocol.walking import run_walks
from tests.protocol.worlds import WALKED, WALKED_WITH_MOVES
from tests.soak_settings import soak_factor

NUM_SCHEDULES = 500
"""A hundredth of what the soak walks (``KVBATON_SOAK=100``)."""
NUM_SCHEDULES_WITH_MOVES = 200
"""About 250 moves: a fortieth of the soak's."""


@pytest.mark.timeout(300 * soak_factor())
def test_random_schedules_keep_the_laws() -> None:
    report = run_walks(WALKED, NUM_SCHEDULES * soak_factor(), chaos_seed())
    charts = [chart for each in report["scenarios"].values() for chart in each["broken"]]
    assert not charts, f"seed {report['seed']}:\n" + "\n\n".join(charts[:3])
    assert report["num_schedules"] >= NUM_SCHEDULES
    for each in report["scenarios"].values():
        assert each["endings"]["answered"] > each["num_schedules"]
        assert len(each["faults"]) >= 8, "the faults do not strike"
        assert each["climbed"]["other_transport"] > 0


@pytest.mark.timeout(300 * soak_factor())
def test_no_move_changes_a_token() -> None:
    """Each token that is delivered is compared with the right one, whatever strikes before, while and after it moves."""
    report = run_walks(WALKED_WITH_MOVES, NUM_SCHEDULES_WITH_MOVES * soak_factor(), chaos_seed())
    charts = [chart for each in report["scenarios"].values() for chart in each["broken"]]
    assert not charts, f"seed {report['seed']}:\n" + "\n\n".join(charts[:3])
    assert report["num_moves"] >= NUM_SCHEDULES_WITH_MOVES
    for each in report["scenarios"].values():
        assert len(each["faults"]) >= 8, "the faults do not strike"
