"""The rules of the decode role: its call, its credit, and what it counts as mixed KV."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidRequestError
from contract.requests import ReceiveTransfer
from contract.state_layout import StateLayout, StatePart
from decode_service.rules import DecodeRules
from protos import worker_pb2 as pb
from tests.role_engines import info_of, settings_of
from tests.worker.test_worker import task, waiting_leg
from worker.role_rules import LegCall

RULES = DecodeRules()


async def test_an_order_with_a_source_becomes_a_request_that_fetches_its_kv(tmp_path: Path) -> None:
    request = await RULES.calls[LegCall.DECODE](waiting_leg(), tmp_path)
    assert isinstance(request.transfer, ReceiveTransfer)


async def test_an_order_without_a_source_becomes_a_request_that_computes_its_prompt(tmp_path: Path) -> None:
    request = await RULES.calls[LegCall.DECODE](pb.DecodeRequest(task=task()), tmp_path)
    assert request.transfer is None and request.pooling_params is None


async def test_a_bad_order_is_refused_before_the_engine_has_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError):
        await RULES.calls[LegCall.DECODE](pb.DecodeRequest(task=task(), source=pb.TransferSource()), tmp_path)


def test_it_serves_nothing_else() -> None:
    assert RULES.calls.keys() == {LegCall.DECODE}


@given(num_blocks=st.integers(2, 5000), step=st.integers(1, 9000), queued=st.none() | st.integers(1, 50_000))
def test_its_credit_is_the_whole_cache_whatever_a_step_holds(
    num_blocks: int, step: int, queued: int | None
) -> None:
    settings = settings_of(max_num_batched_tokens=step, max_queued_tokens=queued, max_num_seqs=7)
    credit = RULES.credit(settings, info_of(num_blocks))
    assert (credit.max_requests, credit.max_tokens) == (7, 4 * (num_blocks - 1))


@pytest.mark.parametrize(("num_slots", "max_requests"), [(6, 3), (99, 7)])
def test_requests_without_a_slot_for_their_states_wait_at_the_router(
    num_slots: int, max_requests: int
) -> None:
    """Slots for snapshots and drafts are none of theirs."""
    states = StateLayout((StatePart(layer=0, name="conv", shape=(1,), dtype="float32"),))
    slots = {"num_state_slots": num_slots, "num_spare_slots": 1, "num_snapshot_slots": 2}
    info = msgspec.structs.replace(info_of(9), states=states, **slots)
    assert RULES.credit(settings_of(max_num_seqs=7), info).max_requests == max_requests


@given(num_leases=st.integers(0, 3), num_fetches=st.integers(0, 3))
def test_its_fetches_are_its_own_and_a_lease_is_not(num_leases: int, num_fetches: int) -> None:
    assert RULES.has_mixed_kv(num_leases=num_leases, num_fetches=num_fetches) is (num_leases > 0)
