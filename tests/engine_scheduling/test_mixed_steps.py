"""Steps in which prompts are computed and answers go on."""

from tests.engine_scheduling.stepping import SteppedEngine, fake_request, receiving
from tests.fakes.engine.fakes import fake_answer


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
