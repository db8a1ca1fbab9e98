"""The decisions of an autoscaler, as routers take and publish them."""

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from contract.scaling import HOLDS, Direction, PoolScaling, ScalingReason, ScalingReport
from router.admin.scaling import ScalingReports
from router.telemetry.metrics import RouterMetrics
from serving.metrics import render
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.test_worker_admin import ADMIN, bearer
from tests.text.tiny_model import END

SAY = Script(tokens=[END])
UP = PoolScaling(
    desired=3,
    direction=Direction.UP,
    reason=ScalingReason.LATENCY,
    held=2,
    held_by=ScalingReason.BUDGET,
)
STEADY = PoolScaling(desired=1, direction=Direction.NONE, reason=ScalingReason.STEADY)
REPORT = ScalingReport(prefill=UP, decode=STEADY)
POOL = {"desired": 1, "direction": "none", "reason": "steady"}


class Book:
    """The reports of a router, and a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.metrics = RouterMetrics()
        self.reports = ScalingReports(self.metrics.scaling, lambda: self.now)

    def samples(self) -> dict[tuple[str, ...], float]:
        """Return the published samples by name and values of labels, which come in the order of their names."""
        self.reports.publish()
        return {
            (sample.name.removeprefix("kvbaton_"), *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(render(self.metrics).decode())
            for sample in family.samples
            if "scaling" in sample.name or "desired" in sample.name
        }


def test_a_decision_is_published_with_what_holds_it() -> None:
    book = Book()
    assert book.samples() == {}
    book.reports.record(REPORT)
    samples = book.samples()
    assert samples["desired_workers", "prefill"] == 3
    assert samples["desired_workers", "decode"] == 1
    held = {key[1:]: value for key, value in samples.items() if key[0] == "scaling_held_workers"}
    assert held.keys() == {(pool, reason.value) for pool in ("prefill", "decode") for reason in HOLDS}
    assert {key for key, value in held.items() if value} == {("prefill", "budget")}
    assert held["prefill", "budget"] == 2
    assert samples["scaling_decisions_total", "up", "prefill", "latency"] == 1
    assert samples["scaling_decisions_total", "none", "decode", "steady"] == 1


def test_the_next_decision_replaces_it_and_counts_go_on() -> None:
    book = Book()
    book.reports.record(REPORT)
    book.reports.record(ScalingReport(prefill=STEADY, decode=STEADY))
    book.reports.record(REPORT)
    book.reports.record(ScalingReport(prefill=STEADY, decode=STEADY))
    samples = book.samples()
    assert samples["desired_workers", "prefill"] == 1
    assert not any(value for key, value in samples.items() if key[0] == "scaling_held_workers")
    assert samples["scaling_decisions_total", "up", "prefill", "latency"] == 2
    assert samples["scaling_decisions_total", "none", "decode", "steady"] == 4


def test_an_old_decision_is_withdrawn_and_its_age_is_published_for_an_hour() -> None:
    book = Book()
    book.reports.record(REPORT)
    book.now = 60.0
    assert ("desired_workers", "prefill") in book.samples()
    assert book.reports.facts()["prefill"]["desired_workers"] == 3
    book.now = 60.1
    names = {key[0] for key in book.samples()}
    assert names == {"scaling_decisions_total", "scaling_decision_age_seconds"}
    assert book.samples()["scaling_decision_age_seconds",] == pytest.approx(60.1)
    assert book.reports.facts() == {}
    book.now = 3600.1
    assert {key[0] for key in book.samples()} == {"scaling_decisions_total"}
    book.reports.record(REPORT)
    assert book.samples()["scaling_decision_age_seconds",] == 0


async def put(cluster: Cluster, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    url = f"http://{cluster.service.addresses.admin}/admin/scaling"
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with cluster.session.put(url, data=data, headers=headers) as response:
        return response.status, await response.json()


async def test_a_report_appears_on_all_pages_of_the_router() -> None:
    async with running_cluster(SAY, PAIR) as cluster:
        up = {"desired": 3, "direction": "up", "reason": "latency", "held": 2, "held_by": "budget"}
        status, answer = await put(cluster, {"prefill": up, "decode": POOL})
        assert status == 200
        prefill = answer["pools"]["prefill"]
        assert (prefill["num_serving"], prefill["desired_workers"]) == (1, 3)
        assert (prefill["scaling_held_workers"], prefill["scaling_held_by"]) == (2, "budget")
        assert answer["pools"]["decode"]["scaling_held_by"] is None
        assert (await cluster.metrics())['kvbaton_desired_workers{pool="prefill"}'] == 3


@pytest.mark.parametrize(("least", "status"), [(0, 200), (1, 503)])
async def test_a_router_without_workers_is_ready_if_an_autoscaler_wakes_its_pools(
    least: int, status: int
) -> None:
    """Else a load balancer would send no request, and no worker would ever be started."""
    async with running_cluster(SAY, PAIR) as cluster:
        pool = {**POOL, "desired": 0, "least": least}
        await put(cluster, {"prefill": pool, "decode": {**pool, "least": 0}})
        for name in list(cluster.workers):
            await cluster.workers.pop(name).stop()
        await cluster.until(lambda state: not state["workers"])
        for path in ("/ready", "/health"):
            async with cluster.session.get(cluster.url(path)) as response:
                assert response.status == status
        admin = f"http://{cluster.service.addresses.admin}/ready"
        async with cluster.session.get(admin) as response:
            assert response.status == status


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        [],
        {},
        {"prefill": POOL},
        {"prefill": POOL, "decode": {**POOL, "desired": -1}},
        {"prefill": POOL, "decode": {**POOL, "desired": 1.5}},
        {"prefill": POOL, "decode": {**POOL, "desired": "1"}},
        {"prefill": POOL, "decode": {**POOL, "reason": "a reason that would be a label"}},
        {"prefill": POOL, "decode": {**POOL, "direction": "sideways"}},
        {"prefill": POOL, "decode": {**POOL, "held_by": "nobody"}},
        {"prefill": POOL, "decode": {**POOL, "more": 1}},
        {"prefill": POOL, "decode": POOL, "both": POOL},
    ],
    ids=lambda body: str(body)[:60],
)
async def test_what_is_no_decision_is_refused_and_not_published(body: Any) -> None:
    async with running_cluster(SAY, ()) as cluster:
        status, answer = await put(cluster, body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert not any("desired" in name for name in await cluster.metrics())


async def test_a_decision_needs_the_admin_key() -> None:
    async with running_cluster(SAY, (), admin_keys=ADMIN) as cluster:
        for headers in ({}, bearer("wrong")):
            assert (await put(cluster, {"prefill": POOL, "decode": POOL}, headers))[0] == 401
        assert (await put(cluster, {"prefill": POOL, "decode": POOL}, bearer(ADMIN)))[0] == 200
