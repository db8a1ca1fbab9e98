"""Steps in which prompts are computed, in chunks, and answers go on."""

from contract.sampling import SamplingParams
from tests.engine_scheduling.stepping import SEND, SteppedEngine, fake_request, receiving
from tests.fakes.engine.fakes import FAKE_EOS, NAN_TOKEN, fake_answer


def test_prompts_beside_answers_get_less_of_a_step() -> None:
    """Answers wait for a prompt's chunk, so it is small beside them; without answers it is as large as a step."""
    engine = SteppedEngine(max_num_batched_tokens=16, max_num_mixed_tokens=5)
    engine.add(fake_request("first", list(range(1, 21)), max_tokens=3))
    engine.step(2)
    engine.add(fake_request("long", list(range(2, 42)), max_tokens=2))
    engine.step(4)
    assert engine.executor.runner.batch_sizes == [16, 4, 1 + 5, 1 + 5, 16, 14]
    assert engine.tokens("first#0.0") == fake_answer(list(range(1, 21)), 3)
    assert engine.tokens("long#0.0") == fake_answer(list(range(2, 42)), 1)


def test_answers_that_start_here_count_too() -> None:
    """Their prompt was computed elsewhere: they wait for their first step as others for their next."""
    engine = SteppedEngine(max_num_batched_tokens=16, max_num_mixed_tokens=3)
    key = receiving(engine)
    engine.connector.publish_peer(key)
    engine.step()
    engine.connector.land(key)
    engine.add(fake_request("long", list(range(1, 30)), max_tokens=1))
    engine.step()
    assert engine.executor.runner.batch_sizes[-1] == 1 + 3


def test_scheduler_output_names_what_the_step_computes() -> None:
    """B1, B2, B4: fields of a step with a new and a known request; the token counts are tokens to process."""
    engine = SteppedEngine()
    engine.add(fake_request("a", [1, 2, 3, 4, 5]))
    engine.step()
    engine.add(fake_request("b", [7, 8, 9], eos_token_ids=(FAKE_EOS,)))
    scheduled = engine.scheduler.schedule()
    assert scheduled.num_scheduled_tokens == {"a#0.0": 1, "b#0.0": 3}
    assert scheduled.total_num_scheduled_tokens == 4
    assert scheduled.finished_req_ids == set()
    new = scheduled.scheduled_new_reqs[0]
    assert (new.req_id, new.prompt_token_ids, new.block_ids) == ("b#0.0", [7, 8, 9], ([3],))
    assert (new.num_computed_tokens, new.num_prompt_tokens, new.eos_token_ids) == (0, 3, (FAKE_EOS,))
    assert new.sampling_params == SamplingParams(max_tokens=4)
    cached = scheduled.scheduled_cached_reqs
    assert cached.req_ids == ["a#0.0"]
    assert cached.resumed_from_preemption == [False]
    assert cached.new_token_ids == [[]]
    assert cached.new_block_ids == [([],)]
    assert cached.num_computed_tokens == [5]
    engine.scheduler.update_from_output(scheduled, engine.executor.execute_model(scheduled))


def test_long_prompt_is_computed_in_chunks_between_decodes() -> None:
    """A32: mixed batches within the budget; the running decode gets its token in every step."""
    engine = SteppedEngine(max_num_batched_tokens=8)
    engine.add(fake_request("short", [1, 2], max_tokens=8))
    engine.step()
    engine.add(fake_request("long", list(range(1, 22)), max_tokens=2))
    for step in range(2, 5):
        engine.step()
        assert len(engine.tokens("short#0.0")) == step
    assert engine.executor.runner.batch_sizes == [2, 8, 8, 8]
    assert engine.tokens("long#0.0") == fake_answer(list(range(1, 22)), 1)
    engine.run()
    assert engine.tokens("long#0.0") == fake_answer(list(range(1, 22)), 2)


def test_only_the_computed_half_of_a_prompt_is_found() -> None:
    """Law 1: its other blocks are reserved and scheduled, but hold nothing yet."""
    engine = SteppedEngine(max_num_batched_tokens=6)
    prompt = list(range(1, 15))
    engine.add(fake_request("p", prompt, transfer=SEND))
    hashes = engine.scheduler.requests["p#0.0"].block_hashes
    found = []
    for _ in range(3):
        scheduled = engine.scheduler.schedule()
        found.append(len(engine.pool.find_cached(hashes)))
        engine.scheduler.update_from_output(scheduled, engine.executor.execute_model(scheduled))
        found.append(len(engine.pool.find_cached(hashes)))
    assert engine.pool.num_blocks_of("lease:p#0.0") == 4
    assert found == [0, 1, 1, 3, 3, 3]


def test_nan_in_a_later_chunk_removes_the_earlier_ones_from_the_cache() -> None:
    """Law 1: they were entered when they were computed; where one chunk is corrupt, none is reused."""
    engine = SteppedEngine(max_num_batched_tokens=4)
    engine.add(fake_request("bad", [1, 2, 3, 4, NAN_TOKEN]))
    hashes = engine.scheduler.requests["bad#0.0"].block_hashes
    engine.step()
    assert len(engine.pool.find_cached(hashes)) == 1
    engine.step()
    assert engine.end("bad#0.0").error_kind == "internal"
    assert engine.pool.find_cached(hashes) == []


def test_timings_and_logprobs_come_with_the_first_tokens() -> None:
    engine = SteppedEngine(max_num_batched_tokens=4)
    engine.add(fake_request("a", [1, 2, 3, 4, 5, 6], 2, sampling={"logprobs": 2}), fake_request("b", [9], 1))
    engine.now = 1.0
    engine.step()
    engine.now = 3.0
    engine.step()
    first = engine.outputs["a#0.0"][0]
    assert first.timings is not None and first.logprobs is not None
    assert (first.timings.queue_seconds, first.timings.prefill_seconds) == (1.0, 2.0)
    entry = first.logprobs[0]
    assert (entry.token_id, entry.rank) == (first.token_ids[0], first.token_ids[0] + 1)
    assert (entry.top_token_ids, entry.top_logprobs) == ((0, 1), (0.0, -1.0))
    engine.run()
    assert engine.outputs["a#0.0"][1].timings is None
    assert engine.outputs["b#0.0"][0].logprobs is None
