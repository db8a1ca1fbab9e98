"""``kvbaton top`` beside an autoscaler."""

import pytest

from contract.scaling import Direction, PoolScaling, ScalingReason, ScalingReport
from launch.router_admin import RouterAdmin, admin_session
from tests.cli.test_operate import SAY, admin, kvbaton
from tests.cli.test_pool_table import drawn
from tests.router.cluster import PAIR, running_cluster


async def test_top_shows_the_desired_workers_beside_those_that_serve() -> None:
    async with running_cluster(SAY, PAIR) as cluster:
        up = PoolScaling(
            desired=3,
            direction=Direction.UP,
            reason=ScalingReason.LATENCY,
            held=2,
            held_by=ScalingReason.BUDGET,
        )
        steady = PoolScaling(desired=1, direction=Direction.NONE, reason=ScalingReason.STEADY)
        async with admin_session(None) as session:
            router = RouterAdmin(cluster.service.addresses.admin, session)
            for num_restarts, shown in ((0, ""), (1, " · 1 restart"), (4, " · 4 restarts")):
                await router.report_scaling(
                    ScalingReport(prefill=up, decode=steady, num_restarts=num_restarts)
                )
                code, output, errors = await kvbaton("top", *admin(cluster), "--once")
                assert (code, errors) == (0, "")
                assert output.splitlines()[1] == (
                    "autoscaler: serving 1 of 3 prefill (latency, 2 more held: budget) + 1 of 1 decode (steady)"
                    + shown
                )


@pytest.mark.parametrize(
    ("reason", "held", "by", "words"),
    [
        ("steady", 0, None, "(steady)"),
        ("stabilizing", -2, "stabilizing", "(2 fewer held: stabilizing)"),
        ("bounds", 1, "bounds", "(1 more held: bounds)"),
        ("forecast", -1, "stabilizing", "(forecast, 1 fewer held: stabilizing)"),
    ],
)
def test_a_decision_says_what_holds_it(reason: str, held: int, by: str | None, words: str) -> None:
    decode = {"num_workers": 2, "num_serving": 2, "scaling_pressure": 0.5, "desired_workers": 2}
    decided = {"scaling_reason": reason, "scaling_held_workers": held, "scaling_held_by": by}
    lines = drawn(120, pools={"decode": {**decode, **decided}})
    assert lines[1].strip() == f"autoscaler: serving 2 of 2 decode {words}"
