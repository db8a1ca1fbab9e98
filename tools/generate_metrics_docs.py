"""Write docs/metrics.md from the declared metrics, or check that the committed page is in sync."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from serving.metric_names import PREFIX, ROUTER_METRICS, WORKER_METRICS, Metric, kind_of
from serving.metrics import ALIASES
from tools.generated_files import write_or_check

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
_HEAD = """# Metrics

<!-- Written by `make metrics-docs` from serving/metric_names.py; change that, not this page. -->

Every router and every worker answers `GET /metrics` on its `admin` port, in Prometheus' text format
0.0.4; a router also on its HTTP port. [operate.md](operate.md) has rules and alerts that read them.

Names and labels are part of the API of a release: a change is in the CHANGELOG.

## For autoscalers

A pool is all workers of one role (`prefill`, `decode` or `both`). These metrics exist without an
autoscaler of ours, so that an HPA or KEDA can read them: `kvbaton_workers`,
`kvbaton_pool_utilization`, `kvbaton_queue_seconds`, `kvbaton_scaling_pressure` and
`kvbaton_slo_attainment`.

- Every router publishes them for the whole pool. Workers report load and KV use to all routers, so
  these parts are the same everywhere. Waits, credit and latency are those of the router itself:
  with several routers use the highest value, as in `max by (pool) (kvbaton_scaling_pressure)`.
- `kvbaton_scaling_pressure` is 1 where a pool is at its goals (`ttft_goal_ms`, `itl_goal_ms`,
  utilization 0.85). A target of 1 makes `desired = ceil(workers * pressure)`.
- A request that waits for workers counts for each pool that has no room. First tokens that are late
  since requests wait for room to decode do not raise the pressure of `prefill`.
- A sample without a value is left out: the utilization without a serving worker, the attainment
  without a request in the last 60 seconds.

With an autoscaler of ours, of processes or of containers, every router also publishes its last
decision: `kvbaton_desired_workers`, `kvbaton_scaling_held_workers`,
`kvbaton_scaling_decisions_total` and `kvbaton_scaling_decision_age_seconds`
([autoscaling.md](autoscaling.md)). A router that a decision did not reach publishes an older one,
so here too use the highest value, and of the age the lowest.

## Labels

`pool` and `role` are `prefill`, `decode` or `both`. `state` of a worker is `starting`, `serving`,
`draining`, `empty`, `changing` or `leaving`; `state` of blocks is what `/debug/state` shows. `kind`
of an error is its kind as in the [API](api.md). `transport` is `shm`, `tcp`, `nixl` or `nccl`.
`result` of goals is `met` or `missed`. `direction` of a decision is `up`, `down` or `none`, and its
`reason` is one of [these](autoscaling.md#reading-a-decision).
"""
_ALIASES = """## Other engines' names

With `metrics_aliases` (`KVBATON_METRICS_ALIASES=vllm,sglang`) routers and workers publish metrics a
second time under the names of other engines, with the label `model_name`, so that dashboards and
autoscalers for those engines can be used. Whatever has no counterpart here is not imitated.
"""


def render() -> str:
    """Return the whole page."""
    parts = [
        _HEAD,
        "\n".join(_section("Routers", ROUTER_METRICS)),
        "\n".join(_section("Workers", WORKER_METRICS)),
        _ALIASES,
        "\n".join(_alias_rows()),
    ]
    return "\n".join(parts)


def _section(title: str, metrics: Mapping[str, Metric]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield "| name | type | labels | meaning |"
    yield "| -- | -- | -- | -- |"
    for name, metric in metrics.items():
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
        yield f"| `{PREFIX}{name}` | {kind_of(name, metric)} | {labels} | {metric.text} |"
    yield ""


def _alias_rows() -> Iterator[str]:
    yield "| alias | metric |"
    yield "| -- | -- |"
    for aliases in ALIASES.values():
        for alias in aliases:
            yield f"| `{alias.name}` | `{PREFIX}{alias.metric}` |"
    yield ""


def main(arguments: list[str], page: Path = PAGE) -> int:
    """Write the page, or with ``--check`` only compare."""
    complaint = f"docs/{page.name} is out of sync with the metrics: run `make metrics-docs`"
    return write_or_check({page: render()}, arguments, complaint)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
