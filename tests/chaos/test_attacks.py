"""Some of the attacks, drawn by chance: what they may cost whole services. ``make soak`` has them all."""

import sys
from pathlib import Path

import pytest

from tests.chaos.attacks.running import run_attack
from tests.chaos.attacks.weapons import WEAPONS
from tests.chaos.settings import chaos_rng

NUM_ATTACKS = 2

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.mark.parametrize("turn", range(NUM_ATTACKS))
async def test_an_attack_costs_bounded_memory_and_log_and_no_other_client_an_answer(
    turn: int, tmp_path: Path
) -> None:
    """H1-H7, M1-M4, L1, L6, L7, P3, P7: each attack is one of these."""
    names = chaos_rng("attacks").sample(sorted(WEAPONS), NUM_ATTACKS)
    report = await run_attack(tmp_path, names[turn], sys.executable)
    assert report.too_much == [], report
