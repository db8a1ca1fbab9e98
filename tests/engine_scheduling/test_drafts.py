"""Drafts in steps of answers: the tokens stay, the number of steps falls, and what is wrong costs nothing but its place."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from contract.outputs import FinishReason
from engine.outputs import LogprobsLists, ModelRunnerOutput, SchedulerOutput
from engine.scheduling.batch.drafting import Drafting, StepCost
from engine.scheduling.blocks.block_pool import blocks_needed
from engine.scheduling.inspection import counters
from engine.scheduling.requests.request import Drafts
from engine.scheduling.stats import SpecDecodingStats
from tests.engine_scheduling.stepping import SteppedEngine, fake_request
from tests.engine_scheduling.test_state_machine import SchedulerMachine
from tests.fakes.engine.fakes import FAKE_EOS, fake_answer
from tests.soak_settings import machine_settings


class RecordedEngine(SteppedEngine):
    """An engine with drafts, whose orders and results a test can read."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**{"speculate": "ngram", "num_speculative_tokens": 3, **changes})
        self.steps: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        compute = self.executor.runner.execute_model

        def recorded(scheduled: SchedulerOutput) -> ModelRunnerOutput:
            # The scheduler goes on to write to its requests; the order and the results stay.
            self.steps.append((scheduled, output := compute(scheduled)))
            return replace(output, sampled_token_ids=[list(tokens) for tokens in output.sampled_token_ids])

        self.executor.runner.execute_model = recorded  # type: ignore[method-assign]

    @property
    def drafting(self) -> Drafting:
        """The part that decides about its drafts."""
        drafting = self.scheduler.batcher.drafting
        assert drafting is not None, "this engine does not speculate"
        return drafting

    def drafted(self) -> Iterator[tuple[str, list[int], list[int]]]:
        """Yield request, drafts and sampled tokens of each request with drafts in each step."""
        for scheduled, output in self.steps:
            for key, drafts in scheduled.scheduled_spec_decode_tokens.items():
                yield key, drafts, output.sampled_token_ids[output.req_id_to_index[key]]


def test_drafts_are_all_scheduled_tokens_but_one_and_the_tokens_stay() -> None:
    """B3, B8, law 6: in steps of answers alone, and never while a prompt is computed."""
    engine = RecordedEngine(max_num_batched_tokens=12)
    prompts = {f"r{index}": [index + 1] * (5 + 3 * index) for index in range(6)}
    for name, prompt in prompts.items():
        engine.add(fake_request(name, prompt, 20))
        engine.step(3)
    engine.run()
    for name, prompt in prompts.items():
        assert engine.tokens(f"{name}#0.0") == fake_answer(prompt, 20)
    lengths = {len(sampled) for _, _, sampled in engine.drafted()}
    assert lengths == {1, 2, 3, 4}, "drafts are right in part, as a whole, or not at all"
    for scheduled, _ in engine.steps:
        counts, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        assert scheduled.total_num_scheduled_tokens <= 12
        if drafts:
            assert not scheduled.scheduled_new_reqs
            assert all(len(drafts.get(key, ())) == count - 1 for key, count in counts.items())
    assert len(engine.steps) < 60, "several tokens a step"


def test_several_tokens_of_one_step_count_up_to_the_one_that_ends_the_answer() -> None:
    """B7, B8: a step returns a list of tokens for each request, and their log probabilities in the rows behind another."""
    engine = SteppedEngine()
    engine.add(fake_request("a", [1, 2], max_tokens=9, eos_token_ids=(FAKE_EOS,), sampling={"logprobs": 0}))
    engine.add(fake_request("b", [3, 4], max_tokens=9, sampling={"logprobs": 0}))
    engine.step()
    scheduled = engine.scheduler.schedule()
    own = engine.executor.execute_model(scheduled)
    sampled = [[5, 6, FAKE_EOS, 7], own.sampled_token_ids[1]]
    tokens = [token for of_request in sampled for token in of_request]
    lists = LogprobsLists([[token] for token in tokens], [[-float(t)] for t in tokens], [1] * 5, [0, 4])
    outputs = engine.scheduler.update_from_output(
        scheduled, replace(own, sampled_token_ids=sampled, logprobs=lists)
    )[0]
    assert [output.token_ids for output in outputs] == [[5, 6, FAKE_EOS], own.sampled_token_ids[1]]
    assert [[entry.token_id for entry in output.logprobs or ()] for output in outputs] == [
        [5, 6, FAKE_EOS],
        own.sampled_token_ids[1],
    ]
    assert (outputs[0].finish_reason, outputs[1].finish_reason) == (FinishReason.STOP, None)
    assert (outputs[0].first_index, engine.scheduler.totals.num_generated_tokens) == (1, 6)
    engine.scheduler.shutdown()
    assert engine.pool.num_free_blocks == engine.pool.num_usable_blocks


def test_no_draft_goes_beyond_the_end_of_an_answer() -> None:
    """By max_tokens, and by the length of the model's positions."""
    engine = RecordedEngine(max_model_len=24)
    engine.add(fake_request("short", [1, 2], 6), fake_request("long", [3] * 12, 100))
    engine.run()
    assert engine.tokens("short#0.0") == fake_answer([1, 2], 6)
    assert engine.tokens("long#0.0") == fake_answer([3] * 12, 12)
    assert engine.end("long#0.0").finish_reason is FinishReason.LENGTH
    ends = {"short#0.0": 6, "long#0.0": 12}
    num_tokens = {"short#0.0": 0, "long#0.0": 0}
    for scheduled, output in engine.steps:
        for key, index in output.req_id_to_index.items():
            drafts = scheduled.scheduled_spec_decode_tokens.get(key, [])
            assert num_tokens[key] + len(drafts) + 1 <= ends[key]
            num_tokens[key] += len(output.sampled_token_ids[index])


def test_a_draft_that_would_end_the_answer_is_left_out_with_all_behind_it() -> None:
    engine = RecordedEngine()
    answer = fake_answer([1, 2, 3], 20)
    stop = answer[10]
    engine.add(fake_request("a", [1, 2, 3], 20, sampling={"stop_token_ids": (stop,)}))
    engine.run()
    assert engine.tokens("a#0.0") == answer[:11]
    assert engine.end("a#0.0").stop_reason == stop
    assert all(stop not in drafts for _, drafts, _ in engine.drafted())


def test_drafts_take_no_block_that_a_running_request_may_need_next() -> None:
    engine = RecordedEngine(kv_cache_bytes=12, num_speculative_tokens=8)  # 11 blocks of 4
    pool = engine.pool
    num_extended = 0

    def check() -> None:
        """A request that has got blocks for drafts has left one for each running request."""
        nonlocal num_extended
        requests = engine.scheduler.requests
        for key, request in requests.items():
            num_known = blocks_needed(request.num_tokens, pool.block_size)
            if pool.num_blocks_of(key) > max(num_known, num_before.get(key, 0)):
                num_extended += 1
                assert pool.num_free_blocks >= len(requests)

    for name in ("a", "b", "c"):
        engine.add(fake_request(name, [len(engine.outputs) + 1, *name.encode()], 14))
    while engine.core.needs_step():
        num_before = pool.holders()
        engine.step(meanwhile=check)
    assert num_extended > 2
    assert engine.tokens("a#0.0") == fake_answer([1, *b"a"], 14)


def test_a_step_that_requests_drafts_has_no_next_step_before_its_results() -> None:
    """The number of tokens by which a request continues is known with the results only, on a device too."""
    started_early = []
    for speculate in ("none", "ngram"):
        engine = RecordedEngine(speculate=speculate)
        engine.executor.runs_ahead = True
        engine.add(fake_request("a", [1, 2, 3], 30))
        while engine.core.needs_step():
            before = engine.num_started_early
            number = len(engine.steps)
            engine.step(2)
            first, _ = engine.steps[number]
            is_open = first.num_draft_tokens or first.scheduled_spec_decode_tokens
            assert not (is_open and engine.num_started_early > before)
        assert engine.tokens("a#0.0") == fake_answer([1, 2, 3], 30)
        started_early.append(engine.num_started_early)
    assert started_early[0] > 10 > started_early[1]


def test_statistics_add_up() -> None:
    """B14: k, drafts, draft tokens, accepted ones, and those by place; None without speculation."""
    engine = RecordedEngine()
    for index in range(3):
        engine.add(fake_request(f"r{index}", [index + 1] * 3, 25))
    engine.run()
    found = [(drafts, len(sampled) - 1) for _, drafts, sampled in engine.drafted()]
    stats = engine.scheduler.make_stats().spec_decoding_stats
    per_pos = [sum(num_right > place for _, num_right in found) for place in range(3)]
    assert stats == SpecDecodingStats(
        num_spec_tokens=3,
        num_drafts=len(found),
        num_draft_tokens=sum(len(drafts) for drafts, _ in found),
        num_accepted_tokens=sum(num_right for _, num_right in found),
        num_accepted_tokens_per_pos=per_pos,
    )
    assert sum(per_pos) == stats.num_accepted_tokens > 0
    own = counters(engine.scheduler)
    assert own["spec_decode_num_accepted_tokens_total"] == stats.num_accepted_tokens
    assert own["spec_decode_num_accepted_tokens_per_pos_total{position=1}"] == per_pos[1]
    assert SteppedEngine().scheduler.make_stats().spec_decoding_stats is None


def step_cost(first: float, each: float, sizes: list[int]) -> StepCost:
    cost = StepCost()
    for size in sizes:
        cost.note(size, first + each * size)
    return cost


def test_the_cost_of_a_token_is_measured_where_numbers_of_tokens_differ() -> None:
    cost = step_cost(8.0, 1.0, [1, 4] * 50)
    assert cost.seconds(8) == pytest.approx(16.0, rel=0.02)
    same = step_cost(8.0, 1.0, [4] * 100)
    assert same.seconds(4) == pytest.approx(12.0)
    assert 12.0 < same.seconds(8) < 16.0, "less than it may cost, so that it is tried"
    cost.note(4, 1000.0)
    assert cost.seconds(4) < 13.0, "one disturbed step counts little"


@pytest.mark.parametrize(
    ("first", "each", "acceptance", "expected"),
    [(10.0, 0.1, 0.9, 3), (10.0, 0.1, 0.4, 3), (10.0, 2.0, 0.4, 1), (0.0, 1.0, 0.8, 0)],
)
def test_drafts_are_requested_while_they_make_more_tokens_a_second(
    first: float, each: float, acceptance: float, expected: int
) -> None:
    engine = RecordedEngine()
    engine.add(fake_request("a", [1, 2, 3], 50))
    engine.step()
    engine.drafting.cost = step_cost(first, each, [1, 2, 3, 4] * 30)
    engine.scheduler.requests["a#0.0"].drafts.acceptance = acceptance
    scheduled = engine.scheduler.schedule()
    assert scheduled.num_draft_tokens.get("a#0.0", 0) == expected


class DearTokens(StepCost):
    """A machine on which drafts are worth their time only if nine of ten are right, in a batch of one request."""

    def seconds(self, num_tokens: int) -> float:
        return 0.25 + 0.75 * num_tokens


def test_a_request_in_doubt_costs_nothing_and_is_compared() -> None:
    """Its steps run ahead as without speculation; what would have been right counts as if it had been computed."""
    engines = RecordedEngine(speculate="none"), RecordedEngine()
    for engine in engines:
        engine.executor.runs_ahead = True
        engine.add(fake_request("a", [1, 2, 3], 200))
    plain, doubted = engines
    doubted.drafting.cost = DearTokens()
    for engine in engines:
        engine.step(100)
    assert doubted.num_started_early == plain.num_started_early > 90
    assert not any(one.num_draft_tokens or one.scheduled_spec_decode_tokens for one, _ in doubted.steps)
    compared = [(one, output) for one, output in doubted.steps if one.num_compared_tokens]
    assert 5 <= len(compared) <= 7
    expected = Drafts(acceptance=0.7)
    for scheduled, output in compared:
        assert scheduled.num_compared_tokens == {"a#0.0": 3}
        if output.num_right_drafts:
            expected.record(3, output.num_right_drafts["a#0.0"])
    drafts = doubted.scheduler.requests["a#0.0"].drafts
    assert drafts.acceptance == pytest.approx(expected.acceptance) != 0.7
    # In a batch in which they are worth their time, they are computed from the next step on.
    doubted.drafting.cost = step_cost(10.0, 0.1, [1, 2, 3, 4] * 30)
    doubted.run()
    assert doubted.tokens("a#0.0") == fake_answer([1, 2, 3], 200)
    assert len(list(doubted.drafted())) > 10


def test_comparisons_end_where_no_draft_could_be_worth_its_time() -> None:
    engine = RecordedEngine()
    engine.drafting.cost = EqualShares()
    engine.add(fake_request("a", [1, 2, 3], 100))
    engine.run()
    assert not any(one.num_compared_tokens or one.num_draft_tokens for one, _ in engine.steps)


def test_a_request_that_found_nothing_is_in_doubt_until_a_comparison_finds_something() -> None:
    engine = RecordedEngine()
    engine.add(fake_request("a", [1, 2, 3], 200))
    engine.step()
    drafts = engine.scheduler.requests["a#0.0"].drafts
    drafts.num_misses = 4
    engine.steps.clear()
    while drafts.num_misses:
        engine.step()
    (*doubted, _, (scheduled, output)) = engine.steps
    assert scheduled.num_compared_tokens and output.num_right_drafts
    assert len(doubted) > 2 and not any(one.num_draft_tokens for one, _ in doubted)
    engine.step()
    assert engine.steps[-1][0].num_draft_tokens


def test_a_step_with_drafts_grows_by_no_more_than_twice() -> None:
    """Or by the drafts of one request: how long a much larger step takes is not known."""
    engine = RecordedEngine(num_speculative_tokens=6, max_num_batched_tokens=200, kv_cache_bytes=200)
    for index in range(8):
        engine.add(fake_request(f"r{index}", [index + 1] * 4, 40))
    engine.run()
    sizes = [one.total_num_scheduled_tokens for one, _ in engine.steps if one.is_decode_only]
    requests = [len(one.num_scheduled_tokens) for one, _ in engine.steps if one.is_decode_only]
    grown = [
        after <= max(num + 6, 2 * before)
        for before, after, num in zip([0, *sizes[:-1]], sizes, requests, strict=True)
    ]
    assert all(grown) and max(sizes) > 20


class EqualShares(StepCost):
    """A machine on which each token costs the same, and a step nothing."""

    def seconds(self, num_tokens: int) -> float:
        return float(num_tokens)


def test_a_step_without_tokens_requests_nothing() -> None:
    """It is expected to take no time if each token was measured to cost an equal share of a step."""
    engine = RecordedEngine()
    engine.drafting.cost = EqualShares()
    engine.add(fake_request("a", [1, 2, 3], 2))
    engine.run()
    engine.core.request_step()
    engine.step()
    assert engine.steps[-1][0].num_draft_tokens == {}
    assert engine.tokens("a#0.0") == fake_answer([1, 2, 3], 2)


class MachineWithDrafts(SchedulerMachine):
    """Proposals that are right, wrong in part or empty, with everything running short."""

    changes: ClassVar = {"speculate": "ngram", "num_speculative_tokens": 5}


class MachineWithDraftsThatRunsAhead(MachineWithDrafts):
    runs_ahead = True


TestSchedulerWithDrafts = MachineWithDrafts.TestCase
TestSchedulerWithDrafts.settings = machine_settings(30, 50)
TestSchedulerThatRunsAhead = MachineWithDraftsThatRunsAhead.TestCase
TestSchedulerThatRunsAhead.settings = machine_settings(20, 50)
