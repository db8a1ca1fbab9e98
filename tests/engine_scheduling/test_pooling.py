"""Embeddings in the scheduler: chunks, cache, preemption, endings, beside answers and legs of hand-overs."""

import pytest

from contract.errors import InvalidRequestError, UnsupportedFieldError
from contract.outputs import FinishReason
from contract.requests import EngineRequest, PoolingParams, SendTransfer
from engine.scheduling.requests.finish import RequestStatus
from tests.engine_scheduling.stepping import PROMPT, SEND, SteppedEngine, fake_request
from tests.fakes.engine.fakes import (
    FAKE_MAX_MODEL_LEN,
    FAKE_VOCAB_SIZE,
    NAN_TOKEN,
    fake_answer,
    fake_embedding,
)

LAST, MEAN, MAX = PoolingParams("last"), PoolingParams("mean"), PoolingParams("max")
LONG = list(range(100, 170))


def embedding_request(name: str, prompt: list[int], pooling: PoolingParams = LAST) -> EngineRequest:
    return fake_request(name, prompt, pooling_params=pooling)


@pytest.mark.parametrize("pooling", [LAST, MEAN, MAX])
@pytest.mark.parametrize("prompt", [PROMPT, LONG, [7], list(range(32))])
def test_a_prompt_becomes_an_embedding_and_no_token(pooling: PoolingParams, prompt: list[int]) -> None:
    engine = SteppedEngine()
    engine.add(embedding_request("e", prompt, pooling))
    engine.run()
    (output,) = engine.outputs["e#0.0"]
    assert output.pooled == fake_embedding(prompt, pooling.pooling_type)
    assert (output.token_ids, output.finish_reason, output.is_leg_finished) == ([], FinishReason.STOP, True)
    assert (output.num_cached_tokens, output.timings is not None) == (0, True)
    assert engine.executor.runner.num_forward_passes == -(-len(prompt) // 32)
    assert not engine.scheduler.has_requests()
    assert engine.pool.usage == 0


def test_the_last_token_uses_the_cache_and_what_is_over_all_tokens_does_not() -> None:
    """A41: all fill it."""
    for first in (LAST, MEAN, MAX):
        engine = SteppedEngine()
        engine.add(embedding_request("first", LONG, first))
        engine.run()
        engine.add(embedding_request("last", LONG, LAST))
        engine.add(embedding_request("mean", LONG, MEAN))
        engine.add(embedding_request("max", LONG, MAX))
        engine.add(fake_request("g", LONG))
        engine.run()
        cached = [engine.end(f"{name}#0.0").num_cached_tokens for name in ("last", "mean", "max")]
        assert cached == [68, 0, 0]
        assert engine.end("max#0.0").pooled == fake_embedding(LONG, "max")
        assert engine.end("last#0.0").pooled == fake_embedding(LONG)
        assert engine.end("mean#0.0").pooled == fake_embedding(LONG, "mean")
        assert engine.outputs["g#0.0"][0].num_cached_tokens == 68
        assert engine.tokens("g#0.0") == fake_answer(LONG, 4)


def test_beside_answers_and_prefill_legs() -> None:
    engine = SteppedEngine()
    engine.add(
        fake_request("g", PROMPT, 20),
        embedding_request("e", LONG, MEAN),
        fake_request("p", LONG[::-1], transfer=SEND),
        embedding_request("f", PROMPT),
    )
    engine.run()
    assert engine.tokens("g#0.0") == fake_answer(PROMPT, 20)
    assert engine.tokens("p#0.0") == fake_answer(LONG[::-1], 1)
    assert engine.end("e#0.0").pooled == fake_embedding(LONG, "mean")
    assert engine.end("f#0.0").pooled == fake_embedding(PROMPT)


def test_it_waits_for_blocks_that_are_lent() -> None:
    """A prefill leg lends 15 of 19 usable blocks; the embedding of 30 tokens needs 8, and never takes lent ones."""
    engine = SteppedEngine(kv_cache_bytes=20)
    engine.add(fake_request("p", LONG[:60], transfer=SEND))
    engine.run()
    engine.add(embedding_request("e", LONG[30:60], MEAN))
    engine.run()
    assert "e#0.0" not in engine.outputs
    engine.connector.end_lease("p#0.0")
    engine.run()
    assert engine.end("e#0.0").pooled == fake_embedding(LONG[30:60], "mean")


@pytest.mark.parametrize("pooling", [LAST, MEAN, MAX])
def test_a_short_pool_preempts_it_and_the_embedding_does_not_change(pooling: PoolingParams) -> None:
    """19 usable blocks of 4: the answer grows while the embedding's long prompt is computed in small chunks."""
    engine = SteppedEngine(kv_cache_bytes=20, max_num_batched_tokens=4)
    engine.add(fake_request("g", PROMPT, 40))
    engine.step(3)
    engine.add(embedding_request("e", LONG[:30], pooling))
    engine.add(fake_request("h", PROMPT[::-1], 20))
    engine.run()
    assert engine.end("e#0.0").pooled == fake_embedding(LONG[:30], pooling.pooling_type)
    assert engine.tokens("g#0.0") == fake_answer(PROMPT, 40)
    assert engine.tokens("h#0.0") == fake_answer(PROMPT[::-1], 20)


@pytest.mark.parametrize("pooling", [LAST, MEAN, MAX])
def test_preempted_between_two_chunks(pooling: PoolingParams) -> None:
    """An answer that came first grows into the blocks that the embedding has begun to fill."""
    engine = SteppedEngine(kv_cache_bytes=13, max_num_batched_tokens=3)
    engine.add(fake_request("g", PROMPT, 30))
    engine.step(4)
    engine.add(embedding_request("e", LONG[:32], pooling))
    engine.run()
    assert engine.scheduler.totals.num_preemptions > 0
    assert engine.end("e#0.0").pooled == fake_embedding(LONG[:32], pooling.pooling_type)
    assert engine.tokens("g#0.0") == fake_answer(PROMPT, 30)


def test_a_prompt_may_fill_the_whole_model() -> None:
    """No answer needs room."""
    whole = [token % 900 for token in range(FAKE_MAX_MODEL_LEN)]
    engine = SteppedEngine(kv_cache_bytes=80)
    engine.add(embedding_request("e", whole), embedding_request("f", [*whole, 1]))
    engine.run()
    assert engine.end("e#0.0").pooled == fake_embedding(whole)
    refused = engine.end("f#0.0")
    assert (refused.error_kind, refused.pooled) == ("invalid_request", None)
    assert f"takes {FAKE_MAX_MODEL_LEN} at most" in (refused.error_message or "")


def test_nan_ends_it_as_corrupted_and_its_kv_is_not_reused() -> None:
    engine = SteppedEngine()
    engine.add(embedding_request("e", [*LONG, NAN_TOKEN], MEAN))
    engine.run()
    output = engine.end("e#0.0")
    assert (output.finish_reason, output.error_kind, output.pooled) == (FinishReason.ERROR, "internal", None)
    assert "hidden states" in (output.error_message or "")
    assert engine.scheduler.totals.num_corrupted == 1
    engine.add(embedding_request("again", LONG))
    engine.run()
    assert engine.end("again#0.0").num_cached_tokens == 0


@pytest.mark.parametrize("num_steps", range(3))
def test_abort_and_deadline_at_every_step(num_steps: int) -> None:
    engine = SteppedEngine()
    engine.add(
        embedding_request("a", LONG, MEAN), fake_request("d", LONG, pooling_params=MEAN, deadline_seconds=5)
    )
    engine.step(num_steps)
    engine.scheduler.abort_request("a", 0)
    engine.now = 6.0
    engine.run()
    assert engine.end("a#0.0").finish_reason is FinishReason.ABORT
    assert engine.end("d#0.0").error_kind == "deadline"
    assert engine.pool.usage == 0


def test_no_more_than_max_num_seqs_run() -> None:
    engine = SteppedEngine(max_num_seqs=2)
    engine.add(*(embedding_request(str(number), PROMPT) for number in range(5)))
    engine.step()
    assert sum(bool(engine.outputs.get(f"{number}#0.0")) for number in range(5)) == 2
    engine.run()
    assert all(engine.end(f"{number}#0.0").pooled == fake_embedding(PROMPT) for number in range(5))
    assert RequestStatus.FINISHED_STOPPED.is_finished


def test_what_cannot_be_an_embedding_is_refused() -> None:
    embedding_request("e", PROMPT).check(FAKE_VOCAB_SIZE)
    bad: list[dict[str, object]] = [
        {"num_choices": 2},
        {"choice": 1},
        {"transfer": SendTransfer("t")},
        {"first_index": 1},
    ]
    for params in (PoolingParams("cls"), PoolingParams()):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError) as caught:
            embedding_request("e", PROMPT, params).check(FAKE_VOCAB_SIZE)
        assert caught.value.param == "pooling_type"
    for fields in bad:
        request = fake_request("e", PROMPT, **{"pooling_params": LAST, **fields})  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError) as caught:
            request.check(FAKE_VOCAB_SIZE)
        assert caught.value.param == "pooling_params"
    with pytest.raises(UnsupportedFieldError):
        fake_request("e", PROMPT, lora_request="l").check(FAKE_VOCAB_SIZE)
