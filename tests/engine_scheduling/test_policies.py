"""The two scheduling policies: which requests share a step, when prompts start, and what running answers wait for."""

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from contract.errors import SIZE_PARAM
from contract.outputs import FinishReason
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.requests.finish import RequestStatus, SequenceStatus
from tests.engine_scheduling.stepping import (
    POLICIES,
    RECEIVE,
    SEND,
    SteppedEngine,
    arrive,
    both_policies,
    fake_request,
    receiving,
)
from tests.fakes.engine.fakes import fake_answer

BASE_SECONDS = 0.5
TOKEN_SECONDS = 0.01
"""The length of a step: of its pass over the weights, and of each token in it."""


class TimedEngine(SteppedEngine):
    """Steps take ``BASE_SECONDS + TOKEN_SECONDS * tokens``. steps: the tokens of each by request. times: of each token."""

    def __init__(self, policy: str, **changes: Any) -> None:
        super().__init__(scheduling_policy=policy, **changes)
        self.steps: list[dict[str, int]] = []
        self.times: dict[str, list[float]] = {}
        self._begin = self.executor.begin
        self.executor.begin = self._timed_begin  # type: ignore[method-assign]

    def advance(self, times: int = 1) -> None:
        for _ in range(times):
            before = {key: len(self.tokens(key)) for key in self.outputs}
            self.step()
            for key in self.outputs:
                num_new = len(self.tokens(key)) - before.get(key, 0)
                self.times.setdefault(key, []).extend([self.now] * num_new)

    def seconds_of(self, num_tokens: int) -> float:
        return BASE_SECONDS + TOKEN_SECONDS * num_tokens

    def _timed_begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        finish = self._begin(scheduled)
        self.steps.append({key.partition("#")[0]: num for key, num in scheduled.num_scheduled_tokens.items()})

        def timed() -> ModelRunnerOutput:
            self.now += self.seconds_of(scheduled.total_num_scheduled_tokens)
            return finish()

        return timed


def whole_prompts(**changes: Any) -> TimedEngine:
    return TimedEngine("prefill-first", **changes)


# Steps of one kind.


def test_as_many_prompts_as_fit_start_before_any_answer_goes_on() -> None:
    """A25, A30: within the tokens of a step and the places; answers go on when no prompt is left that can start."""
    engine = whole_prompts(max_num_batched_tokens=10, max_num_seqs=5)
    engine.add(fake_request("a", [1, 2, 3], 4))
    engine.advance(2)
    engine.add(*(fake_request(f"p{n}", [n] * length, 2) for n, length in enumerate([4, 5, 3, 9, 1])))
    engine.advance(6)
    assert engine.steps == [
        {"a": 3},
        {"a": 1},
        {"p0": 4, "p1": 5},  # p2 does not fit, and is not passed by p4
        {"p2": 3},  # p3 does not
        {"p3": 9},  # the fifth place
        {"a": 1, "p0": 1, "p1": 1, "p2": 1, "p3": 1},
        {"p4": 1},
        {"a": 1, "p4": 1},
    ]
    assert engine.tokens("p3#0.0") == fake_answer([3] * 9, 2)


def test_no_step_mixes_prompts_and_answers() -> None:
    """A25, A30: whatever comes, with scarce blocks and places, preempted, aborted, with steps that run ahead."""
    mixed = {}
    for policy in POLICIES:
        engine = TimedEngine(policy, kv_cache_bytes=18, max_num_seqs=4, max_num_batched_tokens=16)
        engine.executor.runs_ahead = True
        rng = Random(3)
        for number in range(150):
            if rng.random() < 0.3:
                prompt = [rng.randrange(1, 50) for _ in range(rng.randint(1, 16))]
                engine.add(fake_request(f"r{number}", prompt, rng.randint(1, 20)))
            engine.step(rng.randint(1, 4))
        engine.run()
        assert engine.scheduler.totals.num_preemptions > 2 and engine.num_started_early > 10
        mixed[policy] = engine.executor.runner.num_mixed_steps
    assert mixed["prefill-first"] == 0 and mixed["chunked-prefill"] > 10


def test_kv_that_arrives_joins_the_answers_and_keeps_its_place() -> None:
    """A30: it waits for no prompt's step, and prompts that came later do not get the place that it needs."""
    engine = whole_prompts(max_num_seqs=2)
    engine.add(fake_request("a", [1, 2], 30))
    engine.advance()
    key = receiving(engine, "d", [1] * 6, 4)
    engine.connector.publish_peer(key)
    engine.advance()
    engine.connector.land(key)
    engine.advance()
    engine.add(fake_request("p", [3] * 5, 2))
    engine.advance(5)
    assert engine.steps[2:] == [{"a": 1, "d": 1}] * 3 + [{"p": 5}, {"a": 1, "p": 1}, {"a": 1}]
    assert engine.tokens(key) == fake_answer([1] * 6, 4)[1:]
    narrow = whole_prompts(max_num_seqs=1)
    narrow.add(fake_request("a", [1, 2], 6))
    narrow.advance()
    early = receiving(narrow, "d", [1] * 6, 3)
    arrive(narrow, early)
    narrow.add(fake_request("p", [3] * 5, 2))
    narrow.run()
    assert list(narrow.outputs) == ["a#0.0", "d#0.0", "p#0.0"], "by arrival, as with the other policy"


def test_prefill_legs_are_lent_under_both_policies() -> None:
    """A25: a prefill worker computes prompts only; its leases and first tokens are the same."""
    for policy in POLICIES:
        engine = TimedEngine(policy)
        for number in range(3):
            engine.add(fake_request(f"s{number}", [number] * 9, transfer=SEND))
        engine.advance()
        assert engine.steps == [{"s0": 9, "s1": 9, "s2": 9}]
        assert [engine.tokens(f"s{n}#0.0") for n in range(3)] == [fake_answer([n] * 9, 1) for n in range(3)]
        assert engine.scheduler.make_stats().num_leases == 3


# The delay.


def test_prompts_wait_while_answers_run_until_the_delay_is_over() -> None:
    """A26: ``now - earliest_arrival > delay_factor * last_prompt_latency``, where the last prompt took 0.6 s."""
    engine = whole_prompts(scheduler_delay_factor=4.0)
    engine.add(fake_request("a", [1] * 10, 30))
    engine.advance()
    assert engine.now == pytest.approx(0.6)
    engine.add(fake_request("early", [1, 2], 1))
    came = engine.now
    engine.advance(2)
    engine.add(fake_request("late", [3, 4], 1))
    while not engine.outputs.get("late#0.0"):
        engine.advance()
    began = engine.now - engine.seconds_of(4)
    assert engine.steps[1:] == [{"a": 1}] * 5 + [{"early": 2, "late": 2}]
    assert began - came > 4 * 0.6 > began - came - engine.seconds_of(1)
    # The step of two prompts was the last one: its length, 0.54 s, is the measure from now on.
    engine.add(fake_request("next", [5], 1))
    engine.advance(6)
    assert engine.steps[-6:] == [{"a": 1}] * 5 + [{"next": 1}]


def test_a_delay_that_is_exactly_over_is_not_over() -> None:
    """A26: the comparison is strict; an arrival in the same moment waits."""
    engine = SteppedEngine(scheduling_policy="prefill-first", scheduler_delay_factor=2.0)
    engine.add(fake_request("a", [1] * 4, 30))

    def pass_second() -> None:
        engine.now += 1.0

    engine.step(meanwhile=pass_second)
    engine.add(fake_request("p", [2] * 3, 1))
    engine.step(meanwhile=pass_second)
    engine.step(meanwhile=pass_second)
    engine.step()
    assert engine.executor.runner.batch_sizes == [4, 1, 1, 1]
    engine.now += 0.001
    engine.step()
    assert engine.executor.runner.batch_sizes == [4, 1, 1, 1, 3]


def test_nothing_delays_prompts_while_no_answer_runs() -> None:
    """A26: "or nothing running": the first prompt starts at once, however long the last one took."""
    engine = whole_prompts(scheduler_delay_factor=100.0)
    engine.add(fake_request("a", [1] * 10, 2))
    engine.advance(2)
    assert engine.end("a#0.0").finish_reason is FinishReason.LENGTH
    engine.add(fake_request("b", [2] * 3, 5))
    engine.advance()
    assert engine.steps == [{"a": 10}, {"a": 1}, {"b": 3}]
    engine.add(fake_request("c", [3] * 3, 1))
    engine.run()
    assert engine.steps[3:8] == [{"b": 1}] * 4 + [{"c": 3}], "it runs when nothing else does"


# Prompts are not cut.


def test_a_prompt_longer_than_a_step_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """A28, A25: as FINISHED_IGNORED, with an error that names both numbers; the longest that fits is computed at once."""
    engine = whole_prompts(max_num_batched_tokens=12)
    assert "prompts longer than 12 tokens are rejected" in caplog.text
    engine.add(fake_request("long", [1] * 13, 2), fake_request("fits", [1] * 12, 2))
    engine.advance()
    end = engine.end("long#0.0")
    assert (end.error_kind, end.error_param) == ("invalid_request", SIZE_PARAM)
    assert "13 tokens" in str(end.error_message) and "computes 12" in str(end.error_message)
    counters = engine.core.call("counters", [])
    assert (counters["requests_ignored_total"], counters["requests_failed_total"]) == (1, 1)
    assert engine.steps == [{"fits": 12}]
    decode = whole_prompts(max_num_batched_tokens=12)
    key = receiving(decode, prompt=[1] * 20, max_tokens=3)
    arrive(decode, key)
    decode.run()
    assert decode.tokens(key) == fake_answer([1] * 20, 3)[1:], "another worker has computed it"


def test_only_what_was_begun_elsewhere_or_preempted_is_cut() -> None:
    """A25, A30: an answer that goes on here is no new prompt: only its last chunk shares a step."""
    engine = whole_prompts(max_num_batched_tokens=12)
    prompt = [1] * 10
    delivered = fake_answer(prompt, 15)
    engine.add(fake_request("a", [7, 8], 30))
    engine.advance()
    engine.add(fake_request("moved", [*prompt, *delivered], 18, first_index=15, attempt=1))
    engine.add(fake_request("p", [3] * 11, 1))
    engine.advance(5)
    assert engine.steps[1:] == [
        {"moved": 12},
        {"moved": 12},
        {"moved": 1, "p": 11},
        {"a": 1, "moved": 1},
        {"a": 1, "moved": 1},
    ]
    engine.run()
    assert engine.tokens("moved#0.1") == fake_answer(prompt, 18)[15:]
    scarce = whole_prompts(kv_cache_bytes=10, max_num_batched_tokens=8, enable_prefix_caching=False)
    for name in "ab":
        scarce.add(fake_request(name, [ord(name)] * 6, 22))
    scarce.run()
    assert scarce.scheduler.totals.num_preemptions > 0 and {"b": 8} in scarce.steps
    assert scarce.executor.runner.num_mixed_steps == 0
    for name in "ab":
        assert scarce.tokens(f"{name}#0.0") == fake_answer([ord(name)] * 6, 22)


# The states.


def test_the_order_of_the_older_statuses_decides_what_has_finished() -> None:
    """A31: seven numbers; each state of a request has one, and has finished if that is above SWAPPED."""
    assert [(one.name, one.value) for one in SequenceStatus] == [
        ("WAITING", 0),
        ("RUNNING", 1),
        ("SWAPPED", 2),
        ("FINISHED_STOPPED", 3),
        ("FINISHED_LENGTH_CAPPED", 4),
        ("FINISHED_ABORTED", 5),
        ("FINISHED_IGNORED", 6),
    ]
    for status in RequestStatus:
        assert SequenceStatus.of(status).is_finished is status.is_finished
    assert SequenceStatus.of(RequestStatus.PREEMPTED) is SequenceStatus.WAITING
    assert SequenceStatus.of(RequestStatus.PREEMPTED, is_swapped=True) is SequenceStatus.SWAPPED
    assert not SequenceStatus.SWAPPED.is_finished


def test_a_report_counts_requests_in_both_views() -> None:
    """A31: those that wait for anything are WAITING; the newer view has a state for each wait."""
    engine = whole_prompts(max_num_seqs=1)
    engine.add(fake_request("a", [1], 3), fake_request("b", [2], 3))
    receiving(engine)
    engine.advance()
    state = engine.core.call("debug_state", [])
    assert state["sequences"] == {"RUNNING": 1, "WAITING": 2}
    assert state["requests"] == {"RUNNING": 1, "WAITING": 1, "WAITING_FOR_REMOTE_KVS": 1}


@both_policies
def test_a_preempted_request_is_swapped_while_a_tier_has_its_blocks(policy: str) -> None:
    """A30, A31: it resumes when blocks are free, with what the tier has, before any prompt that came later."""
    engine = SteppedEngine(with_connector=False, kv_cache_bytes=8, host_kv_bytes=32, max_model_len=24)
    engine.add(fake_request("a", [1] * 6, 16), fake_request("b", [2] * 6, 16))
    while not engine.scheduler.totals.num_preemptions:
        engine.step()
    engine.add(fake_request("later", [3] * 9, 2))
    state = engine.core.call("debug_state", [])
    assert state["sequences"] == {"RUNNING": 1, "SWAPPED": 1, "WAITING": 1}
    assert state["requests"] == {"RUNNING": 1, "PREEMPTED": 1, "WAITING": 1}
    while "SWAPPED" in engine.core.call("debug_state", [])["sequences"]:
        assert "later#0.0" not in engine.outputs
        engine.step()
    engine.run()
    assert engine.executor.tiers[0].loads
    assert policy == "chunked-prefill" or engine.executor.runner.num_mixed_steps == 0
    assert engine.tokens("b#0.0") == fake_answer([2] * 6, 16)
    assert engine.tokens("later#0.0") == fake_answer([3] * 9, 2)


# The time line.


def gaps_around_a_prompt(policy: str, num_tokens: int, chunk: int) -> tuple[list[float], float]:
    """Return the gaps of an answer while a prompt of ``num_tokens`` comes, and the seconds to the prompt's first token."""
    engine = TimedEngine(
        policy, max_num_batched_tokens=num_tokens, max_num_mixed_tokens=chunk, kv_cache_bytes=200
    )
    engine.add(fake_request("answer", [1, 2, 3], 40))
    engine.advance(5)
    came = engine.now
    engine.add(fake_request("prompt", [5] * num_tokens, 2))
    while "prompt#0.0" not in engine.outputs:
        engine.advance()
    first = engine.now - came
    engine.advance(5)
    return [later - earlier for earlier, later in pairwise(engine.times["answer#0.0"])], first


@pytest.mark.parametrize(("num_tokens", "chunk"), [(200, 20), (100, 50), (30, 10)])
def test_an_arrival_delays_running_answers_by_its_whole_prompt_or_by_one_chunk(
    num_tokens: int, chunk: int
) -> None:
    """A33: the time line of both policies. The prompt's own first token is where the price for short gaps is paid."""
    whole, first_of_whole = gaps_around_a_prompt("prefill-first", num_tokens, chunk)
    chunked, first_of_chunked = gaps_around_a_prompt("chunked-prefill", num_tokens, chunk)
    prompt_seconds = BASE_SECONDS + TOKEN_SECONDS * num_tokens
    assert max(whole) >= prompt_seconds
    assert max(chunked) <= BASE_SECONDS + TOKEN_SECONDS * (chunk + 1) + 1e-9
    assert first_of_whole == pytest.approx(prompt_seconds) and first_of_chunked > first_of_whole


# Answers.


def answers_of(policy: str, seed: int) -> dict[str, list[int]]:
    """Return the tokens of a random load with all kinds of requests, in a pool that is too small."""
    speculate = "ngram" if seed > 1 else "none"
    engine = TimedEngine(
        policy, kv_cache_bytes=16, max_num_seqs=4, max_num_batched_tokens=24, speculate=speculate
    )
    engine.executor.runs_ahead = bool(seed % 2)
    rng = Random(seed)
    for number in range(60):
        prompt = [rng.randrange(1, 40) for _ in range(rng.randint(1, 24))]
        kind = rng.choice([None, None, SEND, RECEIVE])
        tenant, priority = rng.choice("xy"), rng.choice([0, 0, 1])
        choices = rng.choice([1, 1, 2])
        engine.add(
            fake_request(
                f"r{number}", prompt, rng.randint(1, 16), transfer=kind, tenant=tenant, priority=priority,
                num_choices=choices, sampling={"seed": rng.randrange(5)},
            )
        )  # fmt: skip
        engine.step(rng.randint(1, 3))
        serve(engine)
    while engine.scheduler.requests:
        engine.run()
        serve(engine)
    assert engine.scheduler.totals.num_preemptions > 0
    return {key: engine.tokens(key) for key in engine.outputs}


def serve(engine: SteppedEngine) -> None:
    """Let the peers do all that they owe."""
    for key, fetch in list(engine.connector.fetches.items()):
        if fetch.state == "asked":
            engine.connector.publish_peer(key)
        elif fetch.state == "reading":
            engine.connector.land(key)
    for key in [key for key, send in engine.connector.sends.items() if send.end]:
        engine.connector.end_lease(key)


@pytest.mark.parametrize("seed", range(4))
def test_answers_do_not_depend_on_the_policy(seed: int) -> None:
    """A25, A30: law 6, over hand-overs, preemption, several choices, clients, priorities and guessed tokens."""
    whole, chunked = (answers_of(policy, seed) for policy in reversed(POLICIES))
    assert whole == chunked and len(whole) > 60
