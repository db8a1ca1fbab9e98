"""A real Prometheus scrapes a started service, evaluates all rules, and finds every declared metric."""

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from autoscaler.timing_model import write_timing
from serving.metric_names import PREFIX, ROUTER_METRICS, WORKER_METRICS
from tests.autoscaler.cases import TIMING
from tests.monitoring.panels import panels_with_data
from tests.monitoring.prometheus import Prometheus, running_prometheus
from tests.service import Service, running_service

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.e2e]
JOBS = {"router": "kvbaton-router", "prefill": "kvbaton-worker", "decode": "kvbaton-worker"}
PAIR = ("--prefill", "1", "--decode", "1")
PROMPT = "Tell me what a baton is, and why runners in a relay hand it over to each other. " * 12
AT_REST_EMPTY = {
    "batch_requests_total",
    "drains_total",
    "flips_total",
    "group_calls_total",
    "group_steps_total",
    "kv_tier_bytes",
    "kv_tier_evicted_blocks_total",
    "kv_tier_failed_blocks_total",
    "kv_tier_loaded_blocks_total",
    "kv_tier_stored_blocks_total",
    "migrations_total",
    "num_batches",
    "request_errors_total",
    "request_replays_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_drafts_total",
    "transfer_converting_links_total",
    "transfer_failures_total",
    "transfer_stale_messages_total",
    "transfer_transport_left_total",
}
"""Metrics that have no series before the first event, or without what they count: files_dir, a group, a tier, guesses."""
_BY_PROMETHEUS = {"__name__", "instance", "job", "le"}


@asynccontextmanager
async def scraped_service(folder: Path) -> AsyncIterator[tuple[Service, Prometheus]]:
    """Run two routers and a pair of workers whose metrics a Prometheus reads, while a client asks.

    The autoscaler may change nothing.
    """
    write_timing(folder / "timing.json", TIMING)
    scaled = ("--autoscale", "--timing", str(folder / "timing.json"))
    async with running_service(folder, "--routers", "2", *PAIR, *scaled) as service:
        targets: dict[str, list[str]] = {job: [] for job in JOBS.values()}
        for process in service.processes:
            targets[JOBS[process["role"]]].append(process["admin"])
        async with running_prometheus(folder, targets) as prometheus:
            await prometheus.until_up(len(service.processes))
            asking = asyncio.create_task(ask_again_and_again(service))
            try:
                yield service, prometheus
            finally:
                asking.cancel()
                with suppress(asyncio.CancelledError):
                    await asking


async def ask_again_and_again(service: Service) -> None:
    """Ask one question after the other, each with a prompt of its own."""
    number = 0
    while True:
        number += 1
        body = {"prompt": f"{number} {PROMPT}", "max_tokens": 24, "ignore_eos": True, "temperature": 0}
        status, answer = await service.post("/v1/completions", body)
        assert status == 200, answer


async def until_counted(prometheus: Prometheus) -> None:
    """Wait until Prometheus has seen ten more answers, in several scrapes, and a decision of the autoscaler."""
    begin = await answers(prometheus)
    async with asyncio.timeout(60):
        while await answers(prometheus) < begin + 10 or not await prometheus.query("kvbaton_desired_workers"):
            await asyncio.sleep(0.2)


async def answers(prometheus: Prometheus) -> float:
    found = await prometheus.query("sum(kvbaton_request_success_total)")
    return float(found[0]["value"][1]) if found else 0.0


async def test_prometheus_finds_every_declared_metric_with_its_labels(tmp_path: Path) -> None:
    async with scraped_service(tmp_path) as (_, prometheus):
        await until_counted(prometheus)
        names: list[str] = await prometheus.get("label/__name__/values")
        found: defaultdict[str, set[str]] = defaultdict(set)
        series = await prometheus.get("series", **{"match[]": '{__name__=~"kvbaton_.*"}'})
        groups = (await prometheus.get("rules"))["groups"]
    declared = {**ROUTER_METRICS, **WORKER_METRICS}
    for labels in series:
        sample = labels["__name__"].removeprefix(PREFIX)
        metric = sample if sample in declared else re.sub(r"_(bucket|sum|count)$", "", sample)
        found[metric] |= labels.keys() - _BY_PROMETHEUS
    assert found.keys() == declared.keys() - AT_REST_EMPTY
    for name, labels in found.items():
        assert labels == set(declared[name].labels), name
    rules = [rule for group in groups for rule in group["rules"]]
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule.get("state", "inactive") != "inactive"] == []
    recorded = {rule["name"] for rule in rules if rule["type"] == "recording"}
    assert recorded <= set(names)


async def test_every_query_of_the_dashboards_returns_data(tmp_path: Path) -> None:
    """A panel that is declared empty at rest is just that."""
    async with scraped_service(tmp_path) as (_, prometheus):
        await until_counted(prometheus)
        wrong = [
            (panel.title, query)
            async for panel, query, has_data in panels_with_data(prometheus, "decode-0", "15s")
            if has_data is panel.is_empty_at_rest
        ]
        workers: list[str] = await prometheus.get("label/worker/values")
    assert wrong == []
    assert workers == ["decode-0", "prefill-0"]


async def test_two_routers_publish_one_number_each_and_the_highest_counts(tmp_path: Path) -> None:
    """A sum over routers would count each worker twice."""
    async with scraped_service(tmp_path) as (_, prometheus):
        await until_counted(prometheus)
        for name in ('kvbaton_workers{state="serving"}', "kvbaton_desired_workers"):
            published = await prometheus.query(name)
            per_pool = Counter(found["metric"]["pool"] for found in published if found["value"][1] == "1")
            assert (per_pool["prefill"], per_pool["decode"]) == (2, 2), name
            highest = await prometheus.query(f"max by (pool) ({name})")
            assert {found["value"][1] for found in highest if found["metric"]["pool"] != "both"} == {"1"}
        (age,) = await prometheus.query("min(kvbaton_scaling_decision_age_seconds)")
        assert 0 <= float(age["value"][1]) < 60
