"""The next step is prepared while one is computed, and may start before its results are processed: answers do not change."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.step_plan import StepPlan
from tests.engine_scheduling.stepping import SteppedEngine, both_policies, fake_request
from tests.fakes.engine.fakes import fake_answer

NUM_STEPS = 120


class Watched:
    """A small engine whose orders are recorded. starts_early: steps may start before the last one's results."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        is_prepared: bool,
        starts_early: bool = False,
        **changes: Any,
    ) -> None:
        self.engine = SteppedEngine(with_connector=False, **changes)
        self.starts_early = starts_early
        self.orders: list[SchedulerOutput] = []
        begin = self.engine.executor.begin

        def watched(scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
            self.orders.append(scheduled)
            return begin(scheduled)

        monkeypatch.setattr(self.engine.executor, "begin", watched)
        if not is_prepared:
            monkeypatch.setattr(self.engine.scheduler, "prepare_next", lambda _: None)

    def live(self, rng: Random) -> None:
        """Requests come and go for a while, by the numbers of ``rng``; then all end."""
        for number in range(NUM_STEPS):
            if rng.random() < 0.2:
                prompt, length = [rng.randrange(1, 50) for _ in range(rng.randint(1, 20))], rng.randint(1, 30)
                stop = {"stop_token_ids": tuple(fake_answer(prompt, rng.randint(1, 40))[-1:])}
                self.engine.add(fake_request(f"r{number}", prompt, length, sampling=stop))
            if rng.random() < 0.03 and self.engine.scheduler.requests:
                self.engine.core.abort([rng.choice(sorted(self.engine.scheduler.requests))])
            self.engine.step(rng.randint(1, 5), starts_early=self.starts_early)
        self.engine.run()


def scarce(num_blocks: int, max_num_seqs: int) -> dict[str, Any]:
    """Return the settings of an engine whose blocks and places may be short."""
    return {"kv_cache_bytes": num_blocks, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 16}


def plain(order: SchedulerOutput) -> dict[str, Any]:
    """Return an order sorted by key: the rows of a batch may come in any order."""
    cached = order.scheduled_cached_reqs
    columns = (
        cached.resumed_from_preemption,
        cached.new_token_ids,
        cached.new_block_ids,
        cached.num_computed_tokens,
    )
    return {
        "cached": dict(zip(cached.req_ids, zip(*columns, strict=True), strict=True)),
        "new": {new.req_id: new for new in order.scheduled_new_reqs},
        "tokens": order.num_scheduled_tokens,
        "total": order.total_num_scheduled_tokens,
        "finished": order.finished_req_ids,
    }


@both_policies
@pytest.mark.parametrize("max_num_seqs", [3, 8])
@pytest.mark.parametrize("num_blocks", [24, 64])
def test_prepared_steps_change_no_order_and_no_answer(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, max_num_seqs: int
) -> None:
    """Starting early changes none either; also if blocks and places are short, and requests are preempted or aborted."""
    changes = scarce(num_blocks, max_num_seqs)
    for seed in range(5):
        plainly = Watched(monkeypatch, is_prepared=False, **changes)
        plainly.live(Random(seed))
        for starts_early in (False, True):
            one = Watched(monkeypatch, is_prepared=True, starts_early=starts_early, **changes)
            one.live(Random(seed))
            assert (one.engine.num_started_early > 20) is starts_early
            assert list(map(plain, one.orders)) == list(map(plain, plainly.orders))
            assert one.engine.outputs == plainly.engine.outputs


def test_a_plan_is_the_next_step_while_no_request_ends_or_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[SchedulerOutput] = []
    of_next_step = StepPlan.of_next_step

    def watched(requests: list[Request], budget: int, num_groups: int) -> StepPlan:
        plan = of_next_step(requests, budget, num_groups)
        prepared.append(plan.to_output())
        return plan

    monkeypatch.setattr(StepPlan, "of_next_step", watched)
    one = Watched(monkeypatch, is_prepared=True)
    one.engine.add(fake_request("a", [1, 2, 3], max_tokens=12), fake_request("b", [4, 5], max_tokens=6))
    one.engine.step(4)
    assert [any(order is one for one in prepared) for order in one.orders] == [False, True, True, True]
    one.engine.add(fake_request("c", [6], max_tokens=2))
    one.engine.step()
    assert one.orders[-1].num_scheduled_tokens == {"a#0.0": 1, "b#0.0": 1, "c#0.0": 1}
    one.engine.run()
    assert {key: len(one.engine.tokens(key)) for key in ("a#0.0", "b#0.0", "c#0.0")} == {
        "a#0.0": 12,
        "b#0.0": 6,
        "c#0.0": 2,
    }


def test_the_next_step_is_prepared_while_the_model_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """``meanwhile`` is called during that time as well."""
    engine, happened = SteppedEngine(with_connector=False), list[str]()
    begin, prepare = engine.executor.begin, engine.scheduler.prepare_next

    def watched_begin(scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        finish = begin(scheduled)
        happened.append("begins")

        def watched_finish() -> ModelRunnerOutput:
            happened.append("ends")
            return finish()

        return watched_finish

    def watched_prepare(scheduled: SchedulerOutput) -> None:
        happened.append("prepare")
        prepare(scheduled)

    monkeypatch.setattr(engine.executor, "begin", watched_begin)
    monkeypatch.setattr(engine.scheduler, "prepare_next", watched_prepare)
    engine.add(fake_request("a", [1, 2, 3], max_tokens=2))
    engine.core.step(lambda: happened.append("meanwhile"))
    assert happened == ["begins", "meanwhile", "prepare", "ends"]
