"""Hand-overs between real processes and sockets under random faults, with real bytes of KV and no model."""

import pytest

from tests.chaos.settings import chaos_rng, chaos_seed
from tests.transfer_faults.faults import WORLD_FAULTS, draw_faults
from tests.transfer_faults.pool import LAYOUT, CodedMemory
from tests.transfer_faults.schedules import run_schedules

NUM_SCHEDULES = 60


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_every_request_ends_once_and_correctly_under_random_faults() -> None:
    """Each schedule: a few requests, one to three faults, and afterwards both workers hold nothing."""
    chaos_rng("transfer faults")
    report = await run_schedules(chaos_seed(), NUM_SCHEDULES)
    assert report.wrong == []
    assert report.num_schedules == NUM_SCHEDULES
    assert report.tally.num_whole > NUM_SCHEDULES
    assert report.tally.errors["transfer_failed"] > 0
    assert report.tally.errors["peer_unreachable"] > 0
    assert report.tally.num_cancelled > 0
    assert report.tricks.total() > 0
    assert report.num_flips + report.num_pulls_again > 0


def test_kv_of_another_prompt_or_a_single_wrong_byte_is_detected() -> None:
    """The schedules depend on it: the fake KV identifies its tokens."""
    memory = CodedMemory(4)
    memory.write([1, 2], [11, 12, 13, 14, 15, 16], 0, 6)
    memory.check([1, 2], [11, 12, 13, 14, 15, 16], 6)
    with pytest.raises(AssertionError, match="position 5: block 2 holds other KV"):
        memory.check([1, 2], [11, 12, 13, 14, 15, 99], 6)
    memory.write_view(1)[LAYOUT.block_bytes - 1] ^= 0x10
    with pytest.raises(AssertionError, match="position 3: block 1 holds other KV"):
        memory.check([1, 2], [11, 12, 13, 14], 4)


def test_a_schedule_depends_on_its_seed_alone_and_every_fault_occurs() -> None:
    first, again = (chaos_rng("drawn faults") for _ in range(2))
    drawn = [draw_faults(first, WORLD_FAULTS, has_data_stream=True) for _ in range(500)]
    assert drawn == [draw_faults(again, WORLD_FAULTS, has_data_stream=True) for _ in range(500)]
    assert {name for names in drawn for name in names} == set(WORLD_FAULTS)
    over_shm = [draw_faults(first, WORLD_FAULTS, has_data_stream=False) for _ in range(500)]
    assert {name for names in over_shm for name in names} == set(WORLD_FAULTS) - {"garble"}
