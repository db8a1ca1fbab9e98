"""A step waits for a request that is about to join it, and the steps before are spread so that it need not wait long."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.stepping.gate import StepPacing, steps_to_delay
from tests.clock import Clock
from tests.engine_scheduling.stepping import PROMPT, SteppedEngine, fake_request, receiving
from tests.fakes.engine.fakes import fake_answer
from tests.soak_settings import machine_settings

STEP_SECONDS = 2.0


def stepping(share: float) -> tuple[StepPacing, Clock]:
    """One step is over."""
    clock = Clock()
    pacing = StepPacing(share, clock)
    step(pacing, clock)
    return pacing, clock


def step(pacing: StepPacing, clock: Clock) -> float:
    """Returns for how long it was held."""
    held = pacing.on_start()
    clock.now += STEP_SECONDS
    pacing.on_end(is_empty=False)
    return held


@pytest.mark.parametrize(
    ("until_due", "hold"),
    [
        (-0.2, 0.0),  # it is late, by an unknown time
        (-0.1, 0.05),  # a little late: it must be here any moment
        (0.2, 0.35),  # it comes first, even if it is a little late
        (0.5, 0.5),
        (0.6, 0.0),  # it waits less for this step's end than the others would for it
        (1.6, 0.3),  # spread over this step and the next one
        (1.7, 0.0),
        (2.0, 0.0),  # it comes when two steps are over
        (3.8, 0.2),
        (8.8, 0.8 / 9),
        (9.5, 0.0),  # too far away for a good estimate
    ],
)
def test_the_smaller_one_of_both_gaps_is_chosen(until_due: float, hold: float) -> None:
    assert steps_to_delay(until_due) == pytest.approx(hold)


@machine_settings(300, 1)
@given(until_due=st.floats(0, 8.99))
def test_no_gap_grows_by_more_than_half_a_step(until_due: float) -> None:
    """It grows by less, the earlier an arrival is known."""
    most, left = 0.0, until_due
    while left > 0:
        hold = min(steps_to_delay(left), left)
        left -= hold
        most = max(most, hold)
        if left > 1e-9:
            left -= 1.0
    assert max(most, -left) <= max(1 / (int(until_due) + 2), 1e-6)


def test_a_step_is_held_until_the_one_that_is_expected_is_there() -> None:
    pacing, clock = stepping(share=0.1)
    due = clock.now + 0.25 * STEP_SECONDS
    assert pacing.seconds_to_delay(due) == pytest.approx(0.4 * STEP_SECONDS)
    clock.now += 0.3 * STEP_SECONDS
    assert pacing.seconds_to_delay(due) == pytest.approx(0.1 * STEP_SECONDS)
    assert step(pacing, clock) == pytest.approx(0.3 * STEP_SECONDS)
    assert pacing.seconds_to_delay(due) == 0, "it has not come"


def test_the_first_request_after_a_rest_waits_for_those_that_come_with_it() -> None:
    pacing, clock = stepping(share=0.1)
    clock.now += 50 * STEP_SECONDS
    pacing.on_idle_end()
    assert pacing.seconds_to_delay(clock.now + 0.1) > 0
    assert step(pacing, clock) == 0, "they came at once"


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2])
def test_no_more_than_its_share_of_the_time_is_spent(share: float) -> None:
    pacing, clock = stepping(share)
    held = 0.0
    for _ in range(1000):
        clock.now += pacing.seconds_to_delay(clock.now + 0.4 * STEP_SECONDS)
        held += step(pacing, clock)
    num_saved_at_first = 4 if share else 0
    assert held <= (1000 * share + num_saved_at_first + 1e-6) * STEP_SECONDS
    assert held >= 0.95 * 1000 * share * STEP_SECONDS


def test_an_interrupted_step_counts_as_held_and_is_not_measured() -> None:
    pacing, clock = stepping(share=0.1)
    for _ in range(3):
        pacing.on_start()
        clock.now += 0.2 * STEP_SECONDS
        pacing.on_interrupt()
    assert step(pacing, clock) == pytest.approx(0.6 * STEP_SECONDS)
    assert pacing.seconds_to_delay(clock.now + 0.25 * STEP_SECONDS) == pytest.approx(0.4 * STEP_SECONDS)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_step_is_interrupted_in_its_first_half_only(share: float) -> None:
    pacing, clock = stepping(share)
    pacing.on_start()
    clock.now += 0.49 * STEP_SECONDS
    assert pacing.may_interrupt() is (share > 0)
    clock.now += 0.02 * STEP_SECONDS
    assert not pacing.may_interrupt()


def test_steps_are_not_interrupted_for_ever() -> None:
    """Each counts as held, and what may be spent on that is saved up slowly."""
    pacing, clock = stepping(share=0.1)
    num_interrupted = 0
    for _ in range(100):
        pacing.on_start()
        clock.now += 0.4 * STEP_SECONDS
        if pacing.may_interrupt():
            num_interrupted += 1
            pacing.on_interrupt()
            step(pacing, clock)
        else:
            clock.now += 0.6 * STEP_SECONDS
            pacing.on_end(is_empty=False)
    assert 10 <= num_interrupted <= (4 + 100 * 0.1) / 0.4


def test_a_first_step_is_not_interrupted() -> None:
    pacing = StepPacing(0.1, Clock())
    pacing.on_start()
    assert not pacing.may_interrupt()


def test_an_empty_step_is_not_measured() -> None:
    pacing, clock = stepping(share=0.1)
    for _ in range(20):
        pacing.on_start()
        pacing.on_end(is_empty=True)
    assert pacing.seconds_to_delay(clock.now + 0.25 * STEP_SECONDS) == pytest.approx(0.4 * STEP_SECONDS)


def answering(engine: SteppedEngine) -> None:
    """One answer goes on, in steps of two seconds, and the KV of request ``d`` is on its way."""

    def compute() -> None:
        engine.now += STEP_SECONDS

    engine.add(fake_request("r", PROMPT, 20))
    engine.step()
    key = receiving(engine)
    engine.connector.publish_peer(key)
    for _ in range(2):
        engine.step(meanwhile=compute)


def test_a_core_holds_a_step_for_kv_that_is_about_to_arrive() -> None:
    engine = SteppedEngine()
    answering(engine)
    assert engine.core.seconds_to_start() == 0, "nobody has said when"
    engine.connector.expected = engine.now + 0.2 * STEP_SECONDS
    assert engine.core.seconds_to_start() == pytest.approx(0.35 * STEP_SECONDS)
    engine.now += 0.2 * STEP_SECONDS
    engine.connector.land("d#0.0")
    engine.connector.expected = None
    assert engine.core.seconds_to_start() == 0, "it is here"
    engine.step()
    assert engine.request_counts() == (2, 0)
    assert engine.core.call("counters", [])["step_held_seconds_total"] == pytest.approx(0.2 * STEP_SECONDS)


def test_an_expected_request_gets_its_blocks_before_the_step() -> None:
    """Else it would be waited for in vain."""
    engine = SteppedEngine()
    answering(engine)
    key = receiving(engine, "late")
    engine.connector.publish_peer(key)
    engine.connector.expected = engine.now + 0.2 * STEP_SECONDS
    assert engine.core.seconds_to_start() not in (0, None)
    assert engine.connector.fetches[key].state == "reading"


@pytest.mark.parametrize("what", ["a prompt waits", "nothing runs", "it may not"])
def test_a_core_holds_nothing_where(what: str) -> None:
    engine = SteppedEngine(max_hold_share=0.0 if what == "it may not" else 0.03)
    answering(engine)
    engine.connector.expected = engine.now + 0.2 * STEP_SECONDS
    if what == "a prompt waits":
        engine.add(fake_request("other", PROMPT))
    elif what == "nothing runs":
        engine.core.abort(["r#0.0"])
    assert engine.core.seconds_to_start() == 0


@pytest.mark.parametrize("is_expected", [True, False])
def test_no_step_starts_early_that_a_request_is_about_to_join(is_expected: bool) -> None:
    engine = SteppedEngine()
    answering(engine)

    def compute() -> None:
        engine.now += STEP_SECONDS
        engine.connector.expected = engine.now + 0.2 * STEP_SECONDS if is_expected else None

    engine.step(2, meanwhile=compute)
    assert engine.num_started_early == (0 if is_expected else 1)


def landing(engine: SteppedEngine, part_of_step: float) -> Callable[[], None]:
    """Return a callback for a step: the KV of request ``d`` arrives after this part of it."""

    def compute() -> None:
        engine.now += part_of_step * STEP_SECONDS
        if "d#0.0" in engine.connector.fetches:
            engine.connector.land("d#0.0")
            engine.now += (1 - part_of_step) * STEP_SECONDS * (not engine.executor.runner.is_interrupted)

    return compute


@pytest.mark.parametrize("part", [0.0, 0.3, 0.7])
def test_a_step_restarts_for_a_request_that_arrives_early_in_it(part: float) -> None:
    """Running answers have the same tokens, later only by the part that was computed in vain."""
    engine = SteppedEngine()
    answering(engine)
    engine.connector.attach(engine.on_connector_event)
    num_tokens, passes = len(engine.tokens("r#0.0")), engine.executor.runner.num_forward_passes
    engine.step(meanwhile=landing(engine, part))
    is_early = part < 0.5
    assert len(engine.tokens("r#0.0")) == num_tokens + (0 if is_early else 1)
    assert engine.executor.runner.num_forward_passes == passes + (0 if is_early else 1)
    engine.step()
    assert engine.request_counts() == (2, 0)
    held = engine.core.call("counters", [])["step_held_seconds_total"]
    assert held == pytest.approx(part * STEP_SECONDS if is_early else 0.0)
    engine.connector.attach(lambda: None)
    engine.run()
    assert engine.tokens("r#0.0") == fake_answer(PROMPT, 20)
    assert engine.tokens("d#0.0") == fake_answer(PROMPT, 4)[1:]


@pytest.mark.parametrize("what", ["all seats are taken", "it may not", "only blocks are asked for"])
def test_no_step_begins_anew_where(what: str) -> None:
    engine = SteppedEngine(
        max_hold_share=0.0 if what == "it may not" else 0.03,
        max_num_seqs=1 if what == "all seats are taken" else 8,
    )
    answering(engine)
    engine.connector.attach(engine.on_connector_event)
    num_tokens = len(engine.tokens("r#0.0"))
    engine.step(meanwhile=engine.on_connector_event if what.startswith("only") else landing(engine, 0.1))
    assert len(engine.tokens("r#0.0")) == num_tokens + 1
