"""Requests that can never run in an engine: they are ignored, which is counted apart from other ends."""

import pytest

from contract.errors import SIZE_PARAM, ErrorKind
from contract.outputs import FinishReason
from contract.requests import EngineRequest, PoolingParams
from engine.scheduling.requests.finish import Finish, RequestStatus
from tests.engine_scheduling.stepping import RECEIVE, SEND, SteppedEngine, fake_request

NUM_BLOCKS, BLOCK_SIZE = 8, 4
POOL_LENGTH = (NUM_BLOCKS - 1) * BLOCK_SIZE
"""The tokens of the pool beside the null block, fewer than the model has positions."""
SHORT = 20
"""A length that is set, and fits into the pool."""


def test_a_refused_request_is_ignored_and_not_aborted() -> None:
    """A28: its status is FINISHED_IGNORED; the client receives an error that names the size."""
    finish = Finish.refused("too long")
    assert finish.status is RequestStatus.FINISHED_IGNORED
    assert (finish.reason, finish.error_kind) == (FinishReason.ERROR, ErrorKind.INVALID_REQUEST)
    assert (finish.error_message, finish.error_param) == ("too long", SIZE_PARAM)


@pytest.mark.parametrize(
    ("longest", "too_long"),
    [
        (SHORT, fake_request("a", [1] * SHORT)),
        (None, fake_request("a", [1] * POOL_LENGTH)),
        (None, fake_request("a", [1] * POOL_LENGTH, num_choices=3)),
        (None, fake_request("a", [1] * POOL_LENGTH, transfer=SEND)),
        (None, fake_request("a", [1] * POOL_LENGTH, transfer=RECEIVE)),
        (None, fake_request("a", [1] * (POOL_LENGTH + 1), pooling_params=PoolingParams("last"))),
    ],
    ids=["length", "pool", "choices", "prefill leg", "decode leg", "embedding"],
)
def test_every_request_that_never_fits_is_ignored(longest: int | None, too_long: EngineRequest) -> None:
    """A27, A28: too long for the engine's length or its pool; each choice counts, and nothing of the request stays."""
    engine = SteppedEngine(kv_cache_bytes=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=longest)
    engine.add(too_long)
    assert not engine.scheduler.requests
    engine.run()
    for key in too_long.keys:
        assert (engine.end(key).error_kind, engine.end(key).error_param) == ("invalid_request", SIZE_PARAM)
    assert ends(engine) == {"finished": 0, "failed": len(too_long.keys), "ignored": len(too_long.keys)}
    assert engine.executor.runner.num_forward_passes == 0
    assert engine.pool.num_free_blocks == engine.pool.num_usable_blocks


def test_other_ends_are_not_ignored() -> None:
    """A28: the longest prompt that fits, a request that was aborted, one that was late, and one that is malformed."""
    engine = SteppedEngine(kv_cache_bytes=NUM_BLOCKS, block_size=BLOCK_SIZE)
    engine.add(fake_request("fits", [1] * (POOL_LENGTH - 1)))
    engine.run()
    assert ends(engine) == {"finished": 1, "failed": 0, "ignored": 0}
    engine.add(
        fake_request("aborted", [1], 20),
        fake_request("late", [1], 20, deadline_seconds=5.0),
        fake_request("bad", [5000]),
    )
    engine.step()
    engine.core.abort(["aborted#0.0"])
    engine.now = 5.0
    engine.run()
    assert engine.end("late#0.0").error_kind == "deadline"
    assert ends(engine) == {"finished": 2, "failed": 2, "ignored": 0}


def ends(engine: SteppedEngine) -> dict[str, float]:
    """Return how many requests ended in each way, of those that are counted."""
    counters = engine.core.call("counters", [])
    return {how: counters[f"requests_{how}_total"] for how in ("finished", "failed", "ignored")}
