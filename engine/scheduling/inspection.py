"""Views of a scheduler for people and metrics, and the check of its integrity."""

from collections import Counter
from typing import Any

from engine.scheduling.remote.kv_sender import lease_holder
from engine.scheduling.requests.status import RequestStatus
from engine.scheduling.scheduler import Scheduler


def debug_state(scheduler: Scheduler) -> dict[str, Any]:
    """Return blocks by state, leases, requests by status, and the connector's own view."""
    connector = scheduler.get_kv_connector()
    by_status = Counter(request.status.name for request in scheduler.requests.values())
    return {
        "blocks": scheduler.pool.count_by_state(),
        "holders": scheduler.pool.holders(),
        "leases": sorted(scheduler.remote_kv.leases),
        "requests": dict(by_status),
        "connector": connector.debug_state() if connector is not None else {},
    }


def counters(scheduler: Scheduler) -> dict[str, float]:
    """Return all counters since the start, name → value, including the connector's."""
    connector = scheduler.get_kv_connector()
    prefix = scheduler.totals.prefix_cache
    num_running, num_waiting = scheduler.load.get_request_counts()
    states = scheduler.pool.count_by_state().items()
    receiver = scheduler.remote_kv.receiver
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
    """Raise AssertionError unless only live requests and leases hold blocks, and each request is in one place."""
    pool = scheduler.pool
    queues = scheduler.queues
    live = scheduler.live
    pool.check_integrity()
    live.index.check_integrity()
    assert sorted(live.index.keys) == sorted(scheduler.requests)
    assert set(pool.holders()) <= {*scheduler.requests, *map(lease_holder, scheduler.remote_kv.leases)}
    all_queues = (queues.running, queues.waiting, queues.arrived)
    queued = [request.key for queue in all_queues for request in queue]
    assert sorted([*queued, *scheduler.waits.keys]) == sorted(scheduler.requests)
    scheduler.waits.check_integrity(scheduler.requests)
    assert all(request.status is RequestStatus.RUNNING for request in queues.running)
    for queue in all_queues:
        assert list(queue) == sorted(queue, key=lambda request: request.precedence)
    for request in queues.waiting:
        assert pool.num_blocks_of(request.key) == request.num_computed_tokens == 0
    for request in [*queues.running, *queues.arrived]:
        assert pool.num_blocks_of(request.key) * pool.block_size >= request.num_computed_tokens
