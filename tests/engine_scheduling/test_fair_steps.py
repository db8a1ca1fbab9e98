"""M3: a client with many answers does not slow down the others' steps; its answers take turns where each costs time."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.batch.fair_steps import MIN_ROWS, RECENT_SECONDS, RowLimit
from tests.engine_scheduling.stepping import SteppedEngine, fake_request
from tests.fakes.engine.fakes import fake_answer
from tests.soak_settings import machine_settings, soaked

BASE_SECONDS = 0.004
PROMPT = [1, 2, 3]
MAX_SLOWDOWN = 1.5
CLIENTS = ("", "alice", "mallory")


class TimedEngine(SteppedEngine):
    """Steps take ``base + per_row * rows`` seconds. rows: of each step so far, by client."""

    def __init__(
        self,
        per_row: float,
        *,
        num_blocks: int = 4000,
        max_num_seqs: int = 64,
        budget: int = 256,
        **changes: Any,
    ) -> None:
        super().__init__(
            kv_cache_bytes=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
            **changes,
        )
        self.rows: list[Counter[str]] = []
        self.keys: list[set[str]] = []
        self.tenants: dict[str, str] = {}
        self._per_row = per_row
        self._begin = self.executor.begin
        self.executor.begin = self._timed_begin  # type: ignore[method-assign]

    def ask(self, tenant: str, number: int, max_tokens: int, prompt: list[int] = PROMPT) -> str:
        request = fake_request(f"{tenant}{number}", prompt, max_tokens, tenant=tenant)
        self.tenants[request.key] = tenant
        self.add(request)
        return request.key

    def _timed_begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        finish, keys = self._begin(scheduled), set(scheduled.num_scheduled_tokens)
        self.keys.append(keys)
        self.rows.append(Counter(self.tenants[key] for key in keys))

        def timed() -> ModelRunnerOutput:
            self.now += BASE_SECONDS + self._per_row * len(keys)
            return finish()

        return timed


def crowded(per_row: float, **changes: Any) -> TimedEngine:
    """Return an engine in which Mallory's 40 answers have run alone; then Alice's starts."""
    engine = TimedEngine(per_row, **changes)
    engine.ask("mallory", 0, 200)
    engine.step(3)
    for number in range(1, 40):
        engine.ask("mallory", number, 200)
    engine.step(3)
    engine.ask("alice", 0, 60)
    engine.step()
    return engine


def test_a_client_with_many_answers_does_not_make_others_steps_long() -> None:
    """Forty of Mallory's answers would make each of Alice's steps five times as long; she gets her turns all the same."""
    engine = crowded(BASE_SECONDS / 8)
    engine.step(15)
    before = engine.now
    engine.step(30)
    small_batch = BASE_SECONDS * (1 + (MIN_ROWS + 1) / 8)
    assert (engine.now - before) / 30 < MAX_SLOWDOWN * small_batch * 1.1
    assert all(rows["alice"] == 1 and MIN_ROWS <= rows["mallory"] < 20 for rows in engine.rows[-30:])
    engine.step(30)
    assert engine.end("alice0#0.0").finish_reason == "length"
    before = engine.now
    while engine.now < before + RECENT_SECONDS:
        engine.step()
    engine.step(2)
    assert engine.rows[-1] == {"mallory": len(engine.scheduler.requests)} and engine.rows[-1]["mallory"] > 20


def test_a_limited_client_leaves_the_machine_idle_most_of_the_time() -> None:
    """While Alice was here a moment ago, the pause between steps with Mallory's answers alone is three times a step.

    Alice's next request ends the pause; so does a second without her.
    """
    engine = crowded(BASE_SECONDS / 8)
    engine.step(10)
    assert engine.core.seconds_to_start() == 0
    engine.core.scheduler.abort_request("alice0", None)
    engine.step()
    before = engine.now
    engine.step()
    assert engine.core.seconds_to_start() == pytest.approx(3 * (engine.now - before))
    engine.ask("alice", 1, 10)
    assert engine.core.seconds_to_start() == 0
    engine.step(2)
    engine.core.scheduler.abort_request("alice1", None)
    engine.step(2)
    assert engine.core.seconds_to_start() not in (0, None)
    engine.now += RECENT_SECONDS
    engine.step(2)
    assert engine.core.seconds_to_start() == 0 and engine.rows[-1] == {"mallory": 40}


def test_steps_of_prompts_alone_cost_no_answer_its_turn() -> None:
    """With prefill-first, a step of prompts precedes each step of Mallory's answers, which still take turns."""
    engine = crowded(BASE_SECONDS / 8, scheduling_policy="prefill-first")
    running = [f"mallory{number}#0.0" for number in range(1, 40)]
    before = {key: len(engine.tokens(key)) for key in running}
    for number in range(1, 100):
        engine.ask("alice", number, 1)
        engine.step(2)
    gained = [len(engine.tokens(key)) - before[key] for key in running]
    assert max(gained) - min(gained) <= 3 and min(gained) > 5


def test_answers_take_turns() -> None:
    """While Alice's answer runs, all 40 get nearly as many turns, and no answer changes."""
    engine = crowded(BASE_SECONDS / 8)
    first = len(engine.keys)
    engine.step(50)
    seen = Counter(key for keys in engine.keys[first:] for key in keys if key.startswith("mallory"))
    assert len(seen) == 40 and max(seen.values()) - min(seen.values()) <= 2
    engine.run()
    assert engine.tokens("alice0#0.0") == fake_answer(PROMPT, 60)
    assert all(engine.tokens(f"mallory{number}#0.0") == fake_answer(PROMPT, 200) for number in range(40))


def test_rows_that_cost_nothing_are_not_held_back() -> None:
    """Every step holds every answer, as on a GPU; the next step still begins before the last one's tokens are processed."""
    engine = crowded(0.0)
    engine.step(30)
    before = engine.num_started_early
    engine.step(20)
    assert all(rows == {"alice": 1, "mallory": 40} for rows in engine.rows[-20:])
    assert engine.num_started_early - before > 15


def test_it_can_be_turned_off() -> None:
    engine = crowded(BASE_SECONDS / 8, max_key_slowdown=0.0)
    engine.step(20)
    assert engine.rows[-1] == {"alice": 1, "mallory": 40}


def test_a_client_alone_gets_every_row() -> None:
    """Also without API keys, where all are one client."""
    engine = TimedEngine(BASE_SECONDS / 8)
    engine.ask("", 0, 50)
    engine.step(3)
    for number in range(1, 40):
        engine.ask("", number, 50)
    engine.step(20)
    assert engine.rows[-1] == {"": 40}


def test_equals_are_not_held_back() -> None:
    """Two clients have as many answers each: no client gets fewer rows than the smallest client has."""
    engine = TimedEngine(BASE_SECONDS / 8)
    engine.ask("alice", 0, 60)
    engine.step(3)
    for number in range(1, 20):
        engine.ask("alice", number, 60)
        engine.ask("mallory", number, 60)
    engine.step(20)
    assert engine.rows[-1] == {"alice": 20, "mallory": 20} or engine.rows[-1] == {"alice": 19, "mallory": 19}


@pytest.mark.parametrize("per_row", [0.0001, 0.0005, 0.002])
def test_the_limit_follows_what_rows_cost(per_row: float) -> None:
    """At any cost, also if it changes: the mean step of 100 is about as long as allowed, or has few rows."""
    limit = RowLimit(MAX_SLOWDOWN)
    for cost in (per_row, per_row * 3, per_row / 2):
        for _ in range(60):
            rows = min(200, limit.rows)
            limit.note(rows, rows, BASE_SECONDS + cost * rows)
            limit.note(2, None, BASE_SECONDS + cost * 2)
        taken = BASE_SECONDS + cost * limit.rows
        allowed = MAX_SLOWDOWN * (BASE_SECONDS + cost * (MIN_ROWS + 1))
        assert taken < 1.2 * allowed or limit.rows == MIN_ROWS
        assert taken > 0.7 * MAX_SLOWDOWN * BASE_SECONDS


def test_short_steps_of_a_busy_moment_do_not_become_the_measure() -> None:
    """Steps of a few rows take twice as long in every second moment: the limit is that of the quiet ones."""
    limit = RowLimit(MAX_SLOWDOWN)
    for _ in range(100):
        for seconds in (BASE_SECONDS, 2 * BASE_SECONDS):
            limit.note(2, None, seconds)
    for _ in range(100):
        limit.note(limit.rows, limit.rows, BASE_SECONDS * (1 + limit.rows / 20))
    assert limit.rows <= 13


def test_the_client_that_was_served_least_begins_next() -> None:
    """M3: a hundred prompts of Mallory's, of a higher priority, wait, two to a step; Alice's begins in the next step."""
    engine = TimedEngine(BASE_SECONDS / 2, max_num_seqs=200, budget=2 * len(PROMPT))
    engine.ask("alice", 0, 2)
    engine.run()
    for number in range(100):
        engine.add(fake_request(f"m{number}", PROMPT, 2, tenant="mallory", priority=100))
        engine.tenants[f"m{number}#0.0"] = "mallory"
    engine.step()
    engine.ask("alice", 1, 2)
    engine.step()
    assert "alice1#0.0" in engine.keys[-1]
    engine.run()
    assert all(engine.tokens(f"m{number}#0.0") == fake_answer(PROMPT, 2) for number in range(100))


@soaked
@machine_settings(60, 1)
@given(
    asked=st.lists(st.tuples(st.sampled_from(CLIENTS), st.integers(1, 30)), min_size=1, max_size=40),
    steps=st.lists(st.integers(0, 6), min_size=40, max_size=40),
    rows=st.sampled_from([4.0, 9.0, 99.0]),
    num_blocks=st.sampled_from([12, 40, 400]),
)
def test_answers_that_sit_out_end_with_the_same_tokens(
    asked: list[tuple[str, int]], steps: list[int], rows: float, num_blocks: int
) -> None:
    """In any order of arrival, with and without preemption, every answer ends, and the integrity check holds."""
    engine = TimedEngine(0.0005, num_blocks=num_blocks, max_num_seqs=24)
    fair = engine.scheduler.batcher.fair_steps
    fair.answers._rows = fair.prompts._rows = rows
    keys = {}
    for number, ((tenant, max_tokens), times) in enumerate(zip(asked, steps, strict=False)):
        keys[engine.ask(tenant, number, max_tokens, [1 + number % 7, 2])] = (number, max_tokens)
        engine.step(times)
    engine.run()
    for key, (number, max_tokens) in keys.items():
        assert engine.tokens(key) == fake_answer([1 + number % 7, 2], max_tokens)


def test_a_client_gets_some_rows_at_any_cost() -> None:
    engine = crowded(BASE_SECONDS)
    engine.step(10)
    assert engine.rows[-1] == {"alice": 1, "mallory": MIN_ROWS}
