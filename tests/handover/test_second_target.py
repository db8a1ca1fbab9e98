"""The first target of a move fails, and another engine continues the answer with the same lease."""

from functools import partial
from pathlib import Path

import pytest
import torch

from contract.identity import Role
from contract.outputs import FinishReason
from engine.client import InProcessClient
from engine.connecting import Transfers
from engine.settings import EngineSettings
from kv_transfer.connector import TransferFactory
from roles.table import STAGES
from tests.checkpoints import make_checkpoint
from tests.engine_pair import running_pair, transfer_factory
from tests.handover.handing_off import Moving
from tests.handover.test_handing_off import SEEDED, assert_same, request_of, undisturbed
from tests.kv_transfer.fakes import CorruptingReceiver


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", seed=3)


async def test_another_engine_fetches_what_the_first_one_could_not_verify(model: Path) -> None:
    """Nothing is computed again, and the answer is the undisturbed one."""
    request = request_of(SEEDED)
    (whole,) = await undisturbed(model, request)
    damage = partial(CorruptingReceiver, block_index=1)
    settings = transfer_factory(Role.DECODE, None, "tcp").settings
    third = TransferFactory(settings.model_copy(update={"worker_id": "third", "boot_id": "boot-third"}))
    async with running_pair(model, damage) as pair:
        other = await InProcessClient.start(
            EngineSettings(model=model, dtype="float32", kv_cache_bytes=16 * 2**20), Transfers(third, STAGES)
        )
        try:
            moving = Moving(request)
            await moving.run(pair.prefill, request, 6)
            leg = moving.next_leg(pair.prefill, "boot-prefill")
            failed = Moving(request)
            await failed.run(pair.decode, leg)
            assert failed.end.finish_reason is FinishReason.ERROR and failed.tokens == []
            await moving.run(other, leg)
            computed = [
                (await each.call("counters"))["prompt_tokens_total"] for each in (pair.prefill, other)
            ]
            await pair.until_free()
        finally:
            await other.shutdown()
    assert_same(moving, whole)
    assert computed == [len(request.prompt_token_ids), 0]
