"""What can be seen of a scheduler from outside: state for people, counters for metrics, and whether the books are right."""

from collections import Counter
from typing import Any

from engine.scheduling.ending import RequestStatus
from engine.scheduling.remote_kv import lease_holder
from engine.scheduling.scheduler import Scheduler


def debug_state(scheduler: Scheduler) -> dict[str, Any]:
    """Blocks by state, leases, requests by state, and the connector's own view."""
    connector = scheduler.get_kv_connector()
    by_status = Counter(request.status.name for request in scheduler.requests.values())
    return {
        "blocks": scheduler.pool.count_by_state(),
        "holders": scheduler.pool.holders(),
        "leases": sorted(scheduler.sender.leases) if scheduler.sender else [],
        "requests": dict(by_status),
        "connector": connector.debug_state() if connector is not None else {},
    }


def counters(scheduler: Scheduler) -> dict[str, float]:
    """Everything that is counted since the start, name → value; the connector's counters among them."""
    connector = scheduler.get_kv_connector()
    prefix = scheduler.prefix_stats
    num_running, num_waiting = scheduler.get_request_counts()
    states = scheduler.pool.count_by_state().items()
    receiver = scheduler.receiver
    return {
        **scheduler.totals.as_counters(),
        "num_requests_running": num_running,
        "num_requests_waiting": num_waiting,
        "kv_cache_usage_perc": scheduler.pool.usage,
        **{f"num_blocks{{state={state}}}": count for state, count in states},
        "prefix_cache_queries_total": prefix.queries,
        "prefix_cache_hits_total": prefix.hits,
        **({"transfer_needed_blocks_total": receiver.num_needed_blocks} if receiver else {}),
        **(connector.counters() if connector is not None else {}),
    }


def check_integrity(scheduler: Scheduler) -> None:
    """Raise AssertionError unless blocks belong to live requests and leases only, and each request is in one place."""
    pool = scheduler.pool
    batcher = scheduler.batcher
    pool.check_integrity()
    scheduler.live.index.check_integrity()
    assert sorted(scheduler.live.index.keys) == sorted(scheduler.requests)
    leases = scheduler.sender.leases if scheduler.sender else ()
    assert set(pool.holders()) <= {*scheduler.requests, *map(lease_holder, leases)}
    places = [
        request.key for queue in (batcher.running, batcher.waiting, batcher.arrived) for request in queue
    ]
    assert sorted([*places, *scheduler.waits.keys]) == sorted(scheduler.requests)
    scheduler.waits.check_integrity(scheduler.requests)
    assert all(request.status is RequestStatus.RUNNING for request in batcher.running)
    for line in (batcher.running, batcher.waiting, batcher.arrived):
        assert list(line) == sorted(line, key=lambda request: request.precedence)
    for request in batcher.waiting:
        assert pool.num_blocks_of(request.key) == request.num_computed_tokens == 0
    for request in [*batcher.running, *batcher.arrived]:
        assert pool.num_blocks_of(request.key) * pool.block_size >= request.num_computed_tokens
