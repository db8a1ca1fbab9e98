"""The rules of the prefill role: its calls, its credit, and what it counts as mixed KV."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidRequestError, UnsupportedFieldError
from contract.requests import PoolingParams, SendTransfer
from prefill_service.rules import PrefillRules
from protos import worker_pb2 as pb
from tests.role_engines import info_of, settings_of
from tests.worker.test_worker import task
from worker.role_rules import LegCall

RULES = PrefillRules()


async def test_an_order_to_prefill_becomes_a_request_that_sends_its_kv(tmp_path: Path) -> None:
    read = RULES.calls[LegCall.PREFILL]
    request = await read(pb.PrefillRequest(task=task(), transfer_id="t"), tmp_path)
    assert request.transfer == SendTransfer("t")
    with pytest.raises(InvalidRequestError, match="transfer_id"):
        await read(pb.PrefillRequest(task=task()), tmp_path)


async def test_an_order_to_embed_is_pooled_as_it_asks_or_else_as_the_models_folder(tmp_path: Path) -> None:
    """A41."""
    read = RULES.calls[LegCall.EMBED]
    assert (await read(pb.EmbedLegRequest(task=task()), tmp_path)).pooling_params == PoolingParams("last")
    config = tmp_path / "1_Pooling" / "config.json"
    config.parent.mkdir()
    config.write_text('{"pooling_mode_mean_tokens": true}')
    assert (await read(pb.EmbedLegRequest(task=task()), tmp_path)).pooling_params == PoolingParams("mean")
    for kind in ("last", "max"):
        for normalize in (True, False):
            order = pb.EmbedLegRequest(task=task(), pooling_type=kind, normalize=normalize)
            assert (await read(order, tmp_path)).pooling_params == PoolingParams(kind, normalize)
    with pytest.raises(InvalidRequestError, match="pooling_type is 'cls'"):
        await read(pb.EmbedLegRequest(task=task(), pooling_type="cls"), tmp_path)
    config.write_text('{"pooling_mode_cls_token": true}')
    with pytest.raises(UnsupportedFieldError, match="cls_token"):
        await read(pb.EmbedLegRequest(task=task()), tmp_path)


def test_it_serves_nothing_else() -> None:
    assert RULES.calls.keys() == {LegCall.PREFILL, LegCall.EMBED}


@given(
    num_blocks=st.integers(2, 5000),
    step=st.integers(1, 9000),
    queued=st.none() | st.integers(1, 50_000),
)
def test_its_credit_is_two_steps_of_prompts_or_what_is_set_but_never_above_the_cache(
    num_blocks: int, step: int, queued: int | None
) -> None:
    settings = settings_of(max_num_batched_tokens=step, max_queued_tokens=queued, max_num_seqs=7)
    credit = RULES.credit(settings, info_of(num_blocks))
    assert credit.max_requests == 7
    assert credit.max_tokens == min(queued or 2 * step, 4 * (num_blocks - 1))


@given(num_leases=st.integers(0, 3), num_fetches=st.integers(0, 3))
def test_its_leases_are_its_own_and_a_fetch_is_not(num_leases: int, num_fetches: int) -> None:
    assert RULES.has_mixed_kv(num_leases=num_leases, num_fetches=num_fetches) is (num_fetches > 0)
