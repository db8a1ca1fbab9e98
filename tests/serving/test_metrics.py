"""Conversion of plain counters to Prometheus families."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.metric_names import ROUTER_METRICS, WORKER_METRICS
from serving.metrics import (
    ALIASES,
    AliasCollector,
    EngineCollector,
    MetricsOptions,
    MetricsPage,
    parse_counter_name,
    render,
)

INFO = {"worker": "p,0", "role": "prefill", "build": "1"}


def test_counter_names_carry_labels() -> None:
    assert parse_counter_name("steps_total") == ("steps_total", {})
    assert parse_counter_name("transfer_blocks_total{transport=tcp, peer=p0}") == (
        "transfer_blocks_total",
        {"transport": "tcp", "peer": "p0"},
    )
    with pytest.raises(ValueError, match="label 'tcp' has no value"):
        parse_counter_name("transfer_blocks_total{tcp}")


def test_samples_of_one_name_are_one_family_with_its_type_and_help() -> None:
    counters = {"num_blocks{state=free}": 5.0, "num_blocks{state=held}": 2.0, "made_up_total": 1.0}
    families = {
        f.name: f for f in text_string_to_metric_families(render(EngineCollector(counters, INFO)).decode())
    }
    blocks = families["kvbaton_num_blocks"]
    assert (blocks.type, blocks.documentation) == ("gauge", "KV blocks of the pool, by state.")
    assert [(sample.labels["state"], sample.value) for sample in blocks.samples] == [
        ("free", 5.0),
        ("held", 2.0),
    ]
    assert families["kvbaton_made_up"].type == "counter"


def test_facts_about_the_worker_are_labels() -> None:
    text = render(EngineCollector({"steps_total": 1.0}, INFO)).decode()
    assert 'kvbaton_worker_info{build="1",role="prefill",worker="p,0"} 1.0' in text
    assert "kvbaton_steps_total 1.0" in text


def test_the_samples_of_a_histogram_are_one_family() -> None:
    counters = {
        "lease_age_seconds_bucket{le=0.5}": 1.0,
        "lease_age_seconds_bucket{le=+Inf}": 2.0,
        "lease_age_seconds_sum": 3.5,
        "lease_age_seconds_count": 2.0,
    }
    text = render(EngineCollector(counters, INFO)).decode()
    assert text.count("# TYPE kvbaton_lease_age_seconds histogram") == 1
    families = {f.name: f for f in text_string_to_metric_families(text)}
    samples = {(s.name, s.labels.get("le")): s.value for s in families["kvbaton_lease_age_seconds"].samples}
    assert samples == {
        ("kvbaton_lease_age_seconds_bucket", "0.5"): 1.0,
        ("kvbaton_lease_age_seconds_bucket", "+Inf"): 2.0,
        ("kvbaton_lease_age_seconds_sum", None): 3.5,
        ("kvbaton_lease_age_seconds_count", None): 2.0,
    }


def test_chosen_aliases_repeat_a_metric_with_the_name_of_the_model() -> None:
    counters = {
        "num_requests_running": 3.0,
        "transfer_failures_total{kind=worker_lost}": 2.0,
        "transfer_size_bytes_bucket{le=+Inf}": 1.0,
        "transfer_size_bytes_sum": 9.0,
        "transfer_size_bytes_count": 1.0,
    }
    source = EngineCollector(counters, INFO)
    assert "vllm" not in render(AliasCollector(source, MetricsOptions().aliases, lambda: "m")).decode()
    options = MetricsOptions(metrics_aliases="vllm, sglang")
    text = render(AliasCollector(source, options.aliases, lambda: "m")).decode()
    assert "kvbaton_num_requests_running 3.0" in text
    assert 'vllm:num_requests_running{model_name="m"} 3.0' in text
    assert 'sglang:num_running_reqs{model_name="m"} 3.0' in text
    assert "# TYPE vllm:nixl_num_failed_transfers_total counter" in text
    assert 'vllm:nixl_num_failed_transfers_total{kind="worker_lost",model_name="m"} 2.0' in text
    assert 'vllm:nixl_bytes_transferred_bucket{le="+Inf",model_name="m"} 1.0' in text


def test_aliases_name_metrics_of_the_same_type_that_are_there() -> None:
    known = {**ROUTER_METRICS, **WORKER_METRICS}
    for engine, aliases in ALIASES.items():
        assert len({alias.name for alias in aliases}) == len(aliases)
        for alias in aliases:
            assert alias.metric in known
            assert alias.name.startswith(f"{engine}:")
            assert alias.name.endswith("_total") == alias.metric.endswith("_total")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="'tgi' is unknown; choose among vllm, sglang"):
        MetricsOptions(metrics_aliases="vllm, tgi")


async def test_a_page_is_rendered_once_in_its_time_for_any_number_of_readers() -> None:
    now = 100.0
    renderings = 0

    async def collector() -> EngineCollector:
        nonlocal renderings
        renderings += 1
        await asyncio.sleep(0)
        return EngineCollector({"num_requests_running": float(renderings)}, {})

    page = MetricsPage(collector, 1.0, lambda: now)
    first = await asyncio.gather(*(page.text() for _ in range(8)))
    assert (renderings, len(set(first))) == (1, 1)
    now = 100.99
    assert await page.text() == first[0]
    now = 101.0
    assert await page.text() != first[0]
    assert renderings == 2
