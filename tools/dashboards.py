"""The dashboards for Grafana: their panels and the queries of these."""

from dataclasses import dataclass

RATE = "$__rate_interval"
"""Grafana replaces it by an interval that contains several scrapes."""
ROUTER = '{job="kvbaton-router"}'
WORKER = '{job="kvbaton-worker"}'
OF_ROLE = "on (instance) group_left (role) kvbaton_worker_info"
CHOSEN = 'on (instance) group_left (worker) kvbaton_worker_info{worker="$worker"}'


@dataclass(frozen=True)
class Target:
    """One query of a panel. legend: the name of its lines, with labels as {{label}}."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A panel. unit: Grafana's id of a unit. is_empty_at_rest: nothing is drawn before the first such event."""

    title: str
    targets: tuple[Target, ...]
    unit: str = "short"
    is_empty_at_rest: bool = False


@dataclass(frozen=True)
class Dashboard:
    """A dashboard. variable: a label of ``kvbaton_worker_info`` to choose from; empty if there is nothing to choose."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    variable: str = ""


def _one(title: str, expression: str, legend: str = "", unit: str = "short", *, rare: bool = False) -> Panel:
    return Panel(title, (Target(expression, legend or title.lower()),), unit, rare)


def _quantiles(title: str, metric: str) -> Panel:
    return Panel(
        title,
        tuple(
            Target(
                f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket[{RATE}])))",
                f"p{share * 100:.0f}",
            )
            for share in (0.5, 0.9, 0.99)
        ),
        "s",
    )


def _mean(metric: str) -> str:
    return f"sum(rate({metric}_sum[{RATE}])) / sum(rate({metric}_count[{RATE}]))"


def _rates(title: str, metric: str, by: str, unit: str = "ops", *, rare: bool = False) -> Panel:
    return _one(title, f"sum by ({by}) (rate({metric}[{RATE}]))", f"{{{{{by}}}}}", unit, rare=rare)


def _of_pool(title: str, metric: str, unit: str = "short") -> Panel:
    return _one(title, f"max by (pool) ({metric})", "{{pool}}", unit)


def _events(title: str, metric: str, by: str) -> Panel:
    return _one(title, f"sum by ({by}) (increase({metric}[1h]))", f"{{{{{by}}}}}", rare=True)


def _of_worker(title: str, expression: str, legend: str = "", unit: str = "short") -> Panel:
    return _one(title, f"{expression} * {CHOSEN}", legend, unit)


_PHASES = ("queue", "prefill", "transfer", "decode")

SERVICE = Dashboard(
    "kvbaton-service",
    "kvbaton: service",
    (
        _rates("Answers per second", "kvbaton_request_success_total", "finished_reason"),
        _rates("Errors per second", "kvbaton_request_errors_total", "kind", rare=True),
        Panel(
            "Requests",
            (
                Target(f"sum(kvbaton_num_requests_waiting{ROUTER})", "without a first token"),
                Target(f"sum(kvbaton_num_requests_running{ROUTER})", "streaming"),
            ),
        ),
        Panel(
            "Tokens per second",
            (
                Target(f"sum(rate(kvbaton_prompt_tokens_total{ROUTER}[{RATE}]))", "prompts"),
                Target(f"sum(rate(kvbaton_generation_tokens_total{ROUTER}[{RATE}]))", "answers"),
            ),
        ),
        _quantiles("Time to first token", "kvbaton_time_to_first_token_seconds"),
        _quantiles("Time between tokens", "kvbaton_inter_token_latency_seconds"),
        _quantiles("Whole request", "kvbaton_e2e_request_latency_seconds"),
        Panel(
            "Where the time goes, mean",
            tuple(Target(_mean(f"kvbaton_request_{phase}_time_seconds"), phase) for phase in _PHASES),
            "s",
        ),
        Panel(
            "Tokens of a request, mean",
            (
                Target(_mean("kvbaton_request_prompt_tokens"), "prompt"),
                Target(_mean("kvbaton_request_uncached_prompt_tokens"), "prompt, computed"),
                Target(_mean("kvbaton_request_generation_tokens"), "answer"),
            ),
        ),
        _one(
            "Requests within their goals, last minute",
            "min by (slo) (kvbaton_slo_attainment)",
            "{{slo}}",
            "percentunit",
        ),
        _one(
            "Failed requests, last 5 minutes",
            "kvbaton:request_errors:ratio5m",
            "of all requests",
            "percentunit",
        ),
        _rates("Replays per second, by error", "kvbaton_request_replays_total", "kind", rare=True),
        _one(
            "Prompts that were computed again, last 5 minutes",
            "kvbaton:prompts_recomputed:ratio5m",
            "of all requests",
            "percentunit",
        ),
    ),
)

POOLS = Dashboard(
    "kvbaton-pools",
    "kvbaton: pools",
    (
        Panel(
            "Serving and desired workers",
            (
                Target('max by (pool) (kvbaton_workers{state="serving"})', "{{pool}}"),
                Target("max by (pool) (kvbaton_desired_workers)", "{{pool}}, desired"),
            ),
        ),
        _one(
            "Workers that a pool needs and does not get",
            "max by (pool, reason) (kvbaton_scaling_held_workers)",
            "{{pool}}: {{reason}}",
        ),
        Panel(
            "Decisions of the autoscaler in the last hour",
            (
                Target(
                    "max by (pool, direction, reason)"
                    ' (increase(kvbaton_scaling_decisions_total{direction!="none"}[1h]))',
                    "{{pool}} {{direction}}: {{reason}}",
                ),
            ),
            is_empty_at_rest=True,
        ),
        _one(
            "Workers in other states",
            'sum by (state) (max by (pool, state) (kvbaton_workers{state!="serving"}))',
            "{{state}}",
        ),
        _one("Pairs of workers that cannot hand over KV", "max by (kind) (kvbaton_failed_pairs)", "{{kind}}"),
        _one(
            "Restarts of workers in the last hour",
            "max by (pool) (increase(kvbaton_worker_restarts_total[1h]))",
            "{{pool}}",
        ),
        _one("Restarts of the autoscaler", "max(kvbaton_autoscaler_restarts)", "autoscaler"),
        _of_pool("Pressure (1: at the goal)", "kvbaton_scaling_pressure"),
        _of_pool("Utilization", "kvbaton_pool_utilization", "percentunit"),
        _of_pool("Wait for the pool", "kvbaton_queue_seconds", "s"),
        _one(
            "Running requests",
            f"sum by (role) (kvbaton_num_requests_running{WORKER} * {OF_ROLE})",
            "{{role}}",
        ),
        _one("KV use", f"avg by (role) (kvbaton_kv_cache_usage_perc * {OF_ROLE})", "{{role}}", "percentunit"),
        Panel(
            "Prompt tokens per second",
            (
                Target(f"sum(rate(kvbaton_prompt_tokens_total{WORKER}[{RATE}]))", "computed"),
                Target(f"sum(rate(kvbaton_cached_tokens_total[{RATE}]))", "cached"),
                Target(f"sum(rate(kvbaton_received_tokens_total[{RATE}]))", "received"),
            ),
        ),
        _one(
            "Hit rate of the prefix caches", "kvbaton:prefix_cache_hit:ratio10m", "all workers", "percentunit"
        ),
        _one(
            "Prompt tokens found in a prefix cache, by API key",
            f"sum by (key) (rate(kvbaton_key_cached_tokens_total[{RATE}]))"
            f" / sum by (key) (rate(kvbaton_key_prompt_tokens_total[{RATE}]))",
            "{{key}}",
            "percentunit",
        ),
        _rates("Placements per second", "kvbaton_routing_decisions_total", "kind"),
        _events("Drains in the last hour", "kvbaton_drains_total", "result"),
        _events("Moved answers in the last hour", "kvbaton_migrations_total", "result"),
        _events("Changes of role in the last hour", "kvbaton_flips_total", "role"),
    ),
)

HAND_OVER = Dashboard(
    "kvbaton-hand-over",
    "kvbaton: hand-over",
    (
        _one("Transfers per second", f"sum(rate(kvbaton_transfer_seconds_count[{RATE}]))", unit="ops"),
        _rates("Bytes per second", "kvbaton_transfer_bytes_total", "transport", "Bps"),
        _quantiles("Whole transfer", "kvbaton_transfer_seconds"),
        _quantiles("Exposed part, which answers wait for", "kvbaton_transfer_exposed_seconds"),
        _one("Mean size", _mean("kvbaton_transfer_size_bytes"), unit="bytes"),
        _one(
            "Share that prompts hide",
            f"1 - sum(rate(kvbaton_transfer_exposed_seconds_sum[{RATE}]))"
            f" / sum(rate(kvbaton_transfer_seconds_sum[{RATE}]))",
            unit="percentunit",
        ),
        Panel(
            "Now",
            (
                Target("sum(kvbaton_leases_active)", "leases"),
                Target("sum(kvbaton_fetches_active)", "fetches"),
                Target("sum(kvbaton_transfers_parked)", "fetches that wait for their sender"),
                Target("sum(kvbaton_transfers_quarantined)", "in quarantine"),
            ),
        ),
        _quantiles("Age of leases at their end", "kvbaton_lease_age_seconds"),
        Panel(
            "Trouble in the last hour",
            (
                Target("sum(increase(kvbaton_leases_expired_total[1h]))", "expired leases"),
                Target("sum(increase(kvbaton_transfer_pulled_again_total[1h]))", "reads again"),
                Target("sum(increase(kvbaton_transfer_fallbacks_total[1h]))", "slower transports"),
                Target("sum(increase(kvbaton_transfer_digest_mismatches_total[1h]))", "wrong digests"),
            ),
        ),
        _events("Failed transfers in the last hour", "kvbaton_transfer_failures_total", "kind"),
        _one(
            "Links by transport and reason",
            "sum by (transport, reason) (kvbaton_transfer_transport_chosen_total)",
            "{{transport}}: {{reason}}",
        ),
        _rates("Handshakes per second", "kvbaton_link_handshakes_total", "result"),
    ),
)

ONE_WORKER = Dashboard(
    "kvbaton-worker",
    "kvbaton: one worker",
    (
        Panel(
            "Requests",
            (
                Target(f"kvbaton_num_requests_running{WORKER} * {CHOSEN}", "running"),
                Target(f"kvbaton_num_requests_waiting{WORKER} * {CHOSEN}", "waiting"),
            ),
        ),
        _of_worker("KV use", "kvbaton_kv_cache_usage_perc", unit="percentunit"),
        _of_worker("Blocks", "kvbaton_num_blocks", "{{state}}"),
        _of_worker("Steps per second", f"rate(kvbaton_steps_total[{RATE}])", unit="ops"),
        Panel(
            "Tokens per second",
            (
                Target(f"rate(kvbaton_prompt_tokens_total{WORKER}[{RATE}]) * {CHOSEN}", "prompts computed"),
                Target(f"rate(kvbaton_cached_tokens_total[{RATE}]) * {CHOSEN}", "prompts cached"),
                Target(f"rate(kvbaton_received_tokens_total[{RATE}]) * {CHOSEN}", "prompts received"),
                Target(f"rate(kvbaton_generation_tokens_total{WORKER}[{RATE}]) * {CHOSEN}", "sampled"),
            ),
        ),
        _of_worker("Preemptions per second", f"rate(kvbaton_num_preemptions_total[{RATE}])", unit="ops"),
        _of_worker(
            "Share of time that steps are delayed",
            f"rate(kvbaton_step_held_seconds_total[{RATE}])",
            unit="percentunit",
        ),
        Panel(
            "Requests that ended, per second",
            (
                Target(f"rate(kvbaton_requests_finished_total[{RATE}]) * {CHOSEN}", "complete"),
                Target(f"rate(kvbaton_requests_failed_total[{RATE}]) * {CHOSEN}", "failed"),
            ),
            "ops",
        ),
        Panel(
            "Transfers",
            (
                Target(f"kvbaton_leases_active * {CHOSEN}", "leases"),
                Target(f"kvbaton_fetches_active * {CHOSEN}", "fetches"),
                Target(f"kvbaton_transfers_quarantined * {CHOSEN}", "in quarantine"),
            ),
        ),
        _of_worker(
            "Bytes received per second",
            f"rate(kvbaton_transfer_bytes_total[{RATE}])",
            "{{transport}}",
            "Bps",
        ),
    ),
    variable="worker",
)

DASHBOARDS = (SERVICE, POOLS, HAND_OVER, ONE_WORKER)
