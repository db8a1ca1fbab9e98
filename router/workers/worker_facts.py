"""The facts about one worker that a router shows to operators."""

from enum import StrEnum
from typing import Any

from contract.identity import Role
from contract.membership import Load
from router.workers.attached_worker import AttachedWorker


class ShownState(StrEnum):
    """The state of an attached worker: STARTING until its first credit, LEAVING once a side has ended its stream.

    CHANGING: it was ordered to take another role, and has not taken it yet. EMPTY: it drains, holds no leg and lends no KV,
    and no leg of this router is on its way to it.
    """

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    EMPTY = "empty"
    CHANGING = "changing"
    LEAVING = "leaving"


def state_of(worker: AttachedWorker) -> ShownState:
    """Return the state of an attached worker."""
    if worker.is_leaving:
        return ShownState.LEAVING
    # a drain is shown before a change of the role: it ends the change
    if worker.capacity.credit.is_draining:
        return ShownState.EMPTY if worker.is_empty else ShownState.DRAINING
    if worker.capacity.ordered:
        return ShownState.CHANGING
    return ShownState.SERVING if worker.has_credit else ShownState.STARTING


def worker_facts(worker: AttachedWorker) -> dict[str, Any]:
    """Return plain data for JSON. A figure that is not known is None: it was not reported, or not measured lately."""
    registration = worker.registration
    capacity = worker.capacity
    load = capacity.load
    is_known = load != Load()
    hits = load.prefix_cache_hits
    queries = load.prefix_cache_queries
    return {
        "id": worker.name,
        "boot_id": registration.boot_id,
        "role": worker.role.value,
        "state": state_of(worker).value,
        "build": registration.build or None,
        "pid": registration.pid or None,
        "host": registration.host or None,
        "age_seconds": worker.age_seconds,
        "num_restarts": registration.num_restarts,
        "group": registration.group or None,
        "group_size": registration.group_size or None,
        "address": registration.address,
        "control_address": registration.control_address or None,
        "admin_address": registration.admin_address or None,
        "num_legs": capacity.num_requests,
        "max_requests": capacity.credit.max_requests,
        "num_leg_tokens": capacity.num_tokens,
        "max_tokens": capacity.credit.max_tokens,
        "num_blocks": registration.num_blocks or None,
        "num_running": load.num_running if is_known else None,
        "num_waiting": load.num_waiting if is_known else None,
        "queued_prompt_tokens": load.queued_prompt_tokens,
        "kv_cache_usage": load.kv_cache_usage if is_known else None,
        "num_free_blocks": load.num_free_blocks,
        # the share of looked-up prompt tokens that its prefix cache had
        "prefix_hit_rate": min(1.0, hits / queries) if queries and hits is not None else None,
        "gpu_used_bytes": load.gpu_used_bytes,
        "gpu_bytes": load.gpu_bytes,
        "num_leases": load.num_leases,
        "num_fetches": load.num_fetches,
        "step_seconds": load.step_seconds,
        "prefill_seconds_per_token": load.prefill_seconds_per_token,
        # first tokens where prompts are computed, gaps where answers continue
        "ttft_seconds": None if worker.role is Role.DECODE else worker.latency.first_token.value,
        "itl_seconds": None if worker.role is Role.PREFILL else worker.latency.token_gap.value,
    }
