"""The limits of the timing model and of measured starts: bounds of corrections, and the patience with a first start."""

import asyncio
import logging
from dataclasses import replace

import pytest

from autoscaler.decision import Order, Verb
from autoscaler.law import decide
from autoscaler.memory import Memory
from protos import worker_pb2 as pb
from tests.autoscaler.cases import POLICY, QUIET, TIMING, D, Law, P, ready, signals
from tests.autoscaler.test_controller import running_service


@pytest.mark.parametrize("seconds", [5.0, 20.0, 300.0])
def test_a_first_start_is_not_given_up_for_ten_minutes_nor_three_times_what_is_known(seconds: float) -> None:
    """The starts before the first order ran on a machine without load, or were not seen at all."""
    limit = max(600.0, 3 * seconds)
    for age, is_given_up in ((limit, False), (limit + 0.1, True)):
        starting = replace(ready(1), starting_ages=(age,))
        first = replace(signals(5.0, starting, ready(1)), num_starts=0, start_seconds=seconds)
        decision, _ = decide(POLICY, TIMING, Memory(), first)
        assert (Order(Verb.FORGET, P) in decision.orders) is is_given_up


def test_a_correction_at_its_bound_is_told_in_the_decision() -> None:
    """Prompts take nine times as long as by the model, and steps as long as by it."""
    law = Law()
    slow = replace(QUIET, prefill_seconds_per_token=9 * TIMING.prefill.seconds(600.0) / 600.0)
    decision = law.run(ready(1, 0.3), ready(1, 2.0), slow, seconds=300)[-1]
    prefill, decode = decision.pools[P], decision.pools[D]
    assert (prefill.correction, prefill.is_correction_bounded) == (2.0, True)
    assert "times 2x the model's, the bound" in decision.line
    assert not decode.is_correction_bounded
    report = decision.report(POLICY)
    assert (report.prefill.correction, report.prefill.is_correction_bounded) == (2.0, True)
    assert (report.decode.correction, report.decode.is_correction_bounded) == (1.0, False)
    absurd = replace(QUIET, prefill_seconds_per_token=1.0)
    decision = law.run(ready(1, 0.3), ready(1, 2.0), absurd, seconds=5)[-1]
    assert decision.pools[P].is_correction_bounded
    near = replace(QUIET, prefill_seconds_per_token=1.5 * TIMING.prefill.seconds(600.0) / 600.0)
    decision = law.run(ready(1, 0.3), ready(1, 2.0), near, seconds=300)[-1]
    assert not decision.pools[P].is_correction_bounded
    assert "the bound" not in decision.line


async def test_a_correction_at_its_bound_is_logged_once_and_published(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The prefill worker reports that a prompt token takes six seconds."""
    async with running_service() as service:
        slow = service.cluster.workers["prefill-0"].stream
        for _ in range(20):
            await service.ask(1)
            slow.report(pb.Load(prefill_seconds_per_token=6.0))
            async with asyncio.timeout(20):
                while not any(
                    one["prefill_seconds_per_token"] for one in (await service.admins[0].pool())["workers"]
                ):
                    await asyncio.sleep(0.01)
            await service.decide()
        told = [record for record in caplog.records if "the bound of a correction" in record.getMessage()]
        assert [record.levelno for record in told] == [logging.WARNING]
        assert "prefill" in told[0].getMessage()
        metrics = await service.cluster.metrics()
    assert metrics['kvbaton_timing_correction{pool="prefill"}'] == 2.0
    assert metrics['kvbaton_timing_correction_bounded{pool="prefill"}'] == 1
    assert metrics['kvbaton_timing_correction_bounded{pool="decode"}'] == 0
