"""Some of the attacks, drawn at random, and the bounds on their effects. ``make soak`` runs all."""

import sys
from pathlib import Path

import pytest

from tests.chaos.attacks.running import run_attack
from tests.chaos.attacks.weapons import WEAPONS
from tests.chaos.settings import chaos_rng

NUM_ATTACKS = 2

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.mark.parametrize("turn", range(NUM_ATTACKS))
async def test_an_attack_has_bounded_effects_and_other_clients_get_answers(turn: int, tmp_path: Path) -> None:
    """H1-H7, M1-M4, L1, L6, L7, P3, P7: each attack is one of these."""
    names = chaos_rng("attacks").sample(sorted(WEAPONS), NUM_ATTACKS)
    report = await run_attack(tmp_path, names[turn], sys.executable)
    assert report.too_much == [], report
