"""The content of a step's order: who advances, who has finished, and all that the runner needs of a new request."""

from contract.requests import PoolingParams
from contract.sampling import SamplingParams
from engine.scheduling.requests.finish import RequestStatus
from tests.engine_scheduling.stepping import SteppedEngine, both_policies, fake_request
from tests.fakes.engine.fakes import FAKE_EOS, fake_answer


def test_a_step_advances_every_running_request_by_one_token() -> None:
    """A19: whatever their number and their lengths, and whether or not another one joins them."""
    engine = SteppedEngine()
    prompts = {f"r{length}": list(range(1, 1 + length)) for length in (1, 5, 9)}
    for num_joined, (name, prompt) in enumerate(prompts.items(), 1):
        engine.add(fake_request(name, prompt, max_tokens=9))
        engine.step()
        assert [len(engine.tokens(f"{one}#0.0")) for one in prompts] == [
            max(0, num_joined - index) for index in range(len(prompts))
        ]
    for num_tokens in (2, 3, 4):
        engine.step()
        for index, (name, prompt) in enumerate(reversed(prompts.items())):
            assert engine.tokens(f"{name}#0.0") == fake_answer(prompt, num_tokens + index)


@both_policies
def test_a_step_names_those_that_have_finished_since_the_last_one() -> None:
    """B2: once, so that the runner frees their rows; also those that were aborted between two steps."""
    engine = SteppedEngine()
    engine.add(fake_request("short", [1, 2], max_tokens=1), fake_request("aborted", [3], max_tokens=9))
    engine.add(fake_request("long", [4], max_tokens=9))
    engine.step()
    engine.scheduler.finish_requests("aborted#0.0", RequestStatus.FINISHED_ABORTED)
    named = []
    for _ in range(2):
        scheduled = engine.scheduler.schedule()
        named.append(scheduled.finished_req_ids)
        assert list(scheduled.num_scheduled_tokens) == ["long#0.0"]
        engine.scheduler.update_from_output(scheduled, engine.executor.execute_model(scheduled))
    assert named == [{"short#0.0", "aborted#0.0"}, set()]


def test_a_new_request_comes_with_all_that_the_runner_needs() -> None:
    """B4: its tokens, its blocks with those that were found, how much of them is computed, and its parameters."""
    engine = SteppedEngine()
    prompt = list(range(1, 13))
    engine.add(fake_request("a", prompt, max_tokens=2))
    engine.run()
    engine.add(fake_request("b", prompt, 3, num_choices=2, eos_token_ids=(FAKE_EOS,), sampling={"seed": 7}))
    engine.add(fake_request("pooled", [5], pooling_params=PoolingParams("last")))
    new, pooled = engine.scheduler.schedule().scheduled_new_reqs
    assert (new.req_id, new.prompt_token_ids, new.num_prompt_tokens) == ("b#0.0", prompt, 12)
    assert new.num_computed_tokens == 8
    assert new.block_ids == (engine.pool.table_of("b#0.0"),)
    assert new.block_ids[0][:2] == [1, 2]
    assert len(new.block_ids[0]) == 3
    assert (new.num_choices, new.eos_token_ids) == (2, (FAKE_EOS,))
    assert (new.sampling_params, new.pooling_params) == (SamplingParams(max_tokens=3, seed=7), None)
    assert (pooled.sampling_params, pooled.pooling_params) == (None, PoolingParams("last"))
    assert pooled.num_computed_tokens == 0
