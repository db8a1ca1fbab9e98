"""Views of a scheduler for people and metrics, and the check of its integrity."""

from collections import Counter
from typing import Any

from engine.scheduling.remote_kv import lease_holder
from engine.scheduling.requests.finish import RequestStatus, SequenceStatus
from engine.scheduling.state import SchedulerState
from engine.scheduling.stats import SpecDecodingStats


def debug_state(scheduler: SchedulerState) -> dict[str, Any]:
    """Return blocks by state, leases, requests by status (in both views), and the connector's own view.

    With recurrent layers, the slots of their states too.
    """
    connector = scheduler.get_kv_connector()
    requests = scheduler.requests.values()
    swapped = scheduler.swapped_requests()
    sequences = (SequenceStatus.of(one.status, is_swapped=one in swapped) for one in requests)
    slots = scheduler.pools.states
    return {
        "blocks": scheduler.pools.count_by_state(),
        **({} if slots is None else {"state_slots": slots.count_by_state()}),
        "holders": scheduler.pools.holders(),
        "leases": sorted(scheduler.remote_kv.sender.leases),
        "requests": dict(Counter(one.status.name for one in requests)),
        "sequences": dict(Counter(status.name for status in sequences)),
        "connector": connector.debug_state() if connector is not None else {},
    }


def counters(scheduler: SchedulerState) -> dict[str, float]:
    """Return all counters since the start, name → value, including the connector's.

    The names are those of ``serving.metric_names.WORKER_METRICS``.
    """
    totals = scheduler.totals
    stats = scheduler.make_stats()
    states = scheduler.pools.count_by_state().items()
    tiers = scheduler.remote_kv.tiers
    of_transfers: dict[str, float] = {}
    if (connector := scheduler.get_kv_connector()) is not None:
        num_needed = scheduler.remote_kv.receiver.num_needed_blocks
        of_transfers = {"transfer_needed_blocks_total": num_needed, **connector.counters()}
    return {
        "requests_total": totals.num_requests,
        "requests_finished_total": totals.num_finished,
        "requests_failed_total": totals.num_failed,
        "requests_ignored_total": totals.num_ignored,
        "requests_corrupted_total": totals.num_corrupted,
        "num_preemptions_total": totals.num_preemptions,
        "steps_total": totals.num_steps,
        "prompt_tokens_total": totals.num_prefill_tokens,
        "cached_tokens_total": totals.num_cached_tokens,
        "received_tokens_total": totals.num_received_tokens,
        "generation_tokens_total": totals.num_generated_tokens,
        "num_requests_running": stats.num_running_reqs,
        "num_requests_waiting": stats.num_waiting_reqs,
        "num_requests_swapped": stats.num_swapped_reqs,
        "kv_cache_usage_perc": stats.kv_cache_usage,
        **{f"num_blocks{{state={state}}}": count for state, count in states},
        "prefix_cache_queries_total": totals.prefix_cache.queries,
        "prefix_cache_hits_total": totals.prefix_cache.hits,
        **_of_drafts(stats.spec_decoding_stats),
        **of_transfers,
        **(tiers.counters() if tiers is not None else {}),
    }


def _of_drafts(drafts: SpecDecodingStats | None) -> dict[str, float]:
    """Return the counters of drafts, in an engine that speculates."""
    if drafts is None:
        return {}
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    per_pos = enumerate(drafts.num_accepted_tokens_per_pos)
    return {
        "spec_decode_num_drafts_total": drafts.num_drafts,
        "spec_decode_num_draft_tokens_total": drafts.num_draft_tokens,
        "spec_decode_num_accepted_tokens_total": drafts.num_accepted_tokens,
        **{f"{name}{{position={place}}}": count for place, count in per_pos},
    }


def check_integrity(scheduler: SchedulerState) -> None:
    """Raise AssertionError unless only live requests, leases and copies to tiers hold blocks, each request in one place."""
    pool = scheduler.pool
    queues = scheduler.queues
    live = scheduler.live
    leases = set(map(lease_holder, scheduler.remote_kv.sender.leases))
    tiers = scheduler.remote_kv.tiers
    copies = tiers.holders if tiers is not None else []
    scheduler.pools.check_integrity(leases, copies)
    live.index.check_integrity()
    assert sorted(live.index.keys) == sorted(scheduler.requests)
    assert set(scheduler.pools.holders()) <= {*scheduler.requests, *leases, *copies}
    all_queues = (queues.running, queues.waiting, queues.arrived)
    queued = [request.key for queue in all_queues for request in queue]
    assert sorted([*queued, *scheduler.waits.keys]) == sorted(scheduler.requests)
    scheduler.waits.check_integrity(scheduler.requests)
    assert all(request.status is RequestStatus.RUNNING for request in queues.running.requests)
    for queue in all_queues:
        assert list(queue) == sorted(queue, key=lambda request: request.precedence)
    for request in queues.waiting.requests:
        assert pool.num_blocks_of(request.key) == request.num_computed_tokens == 0
    for request in [*queues.running.requests, *queues.arrived.requests]:
        assert pool.num_blocks_of(request.key) * pool.block_size >= request.num_computed_tokens
