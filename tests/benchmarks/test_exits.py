"""Small runs of ``python -m benchmarks.exits``, without checks of speed: nothing fails when a worker is stopped."""

import random
from pathlib import Path

import pytest

from benchmarks.exits import measure_decode, measure_prefill

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


async def test_a_decode_worker_leaves_its_answers_to_another_one(tmp_path: Path) -> None:
    """Each is moved with its KV, and none is computed again."""
    found = await measure_decode(tmp_path, random.Random(6), num_streams=6, num_prompt=400)
    assert (found["errors"], found["exit_code"], found["replays"]) == ([], 0, 0)
    assert found["moves"]["moved"] == 6 and "replayed" not in found["moves"]


async def test_a_prefill_worker_leaves_when_its_kv_is_read(tmp_path: Path) -> None:
    found = await measure_prefill(tmp_path, random.Random(6), 8, 0)
    assert (found["errors"], found["exit_code"], found["num_failed_fetches"]) == ([], 0, 0)
    assert found["num_requests"] > 2
