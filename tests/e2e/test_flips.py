"""Real workers change their roles again and again under load, and every answer is what it is undisturbed."""

import json
import random
import secrets
import sys
from pathlib import Path

import pytest

from tests.e2e.flips import run_flips

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

NUM_FLIPS = 100
NUM_CLIENTS = 32


async def test_roles_change_under_load_and_no_answer_changes(tmp_path: Path) -> None:
    """``benchmarks/flips.py`` does ten times as many, and reports the times."""
    seed = secrets.randbelow(2**32)
    sys.stderr.write(f"flips: seed {seed}\n")
    figures = await run_flips(tmp_path, NUM_FLIPS, NUM_CLIENTS, random.Random(seed))
    sys.stderr.write(json.dumps(figures, indent=2) + "\n")
    assert figures["flips"] == NUM_FLIPS
    assert not figures["num_wrong"], figures["wrong"]
    assert figures["answers"] > NUM_FLIPS
    assert not any(value for name, value in figures.items() if "replay" in name), figures
