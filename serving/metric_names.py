"""The names of all metrics, with their types, labels and help texts. docs/metrics.md is generated from them."""

from collections.abc import Mapping
from typing import NamedTuple

PREFIX = "kvbaton_"


class Metric(NamedTuple):
    """One metric. labels: in the order in which values are given. is_histogram: it counts values in buckets."""

    text: str
    labels: tuple[str, ...] = ()
    is_histogram: bool = False


def kind_of(name: str, metric: Metric) -> str:
    """Return the Prometheus type. A name that ends in ``_total`` is that of a counter."""
    if metric.is_histogram:
        return "histogram"
    return "counter" if name.endswith("_total") else "gauge"


WORKER_METRICS: Mapping[str, Metric] = {
    "worker_info": Metric("Always 1. The labels are facts about the worker.", ("worker", "role", "build")),
    "num_requests_running": Metric("Requests in the running batch."),
    "num_requests_waiting": Metric("Requests that wait for a place in the batch, or for their KV."),
    "num_requests_swapped": Metric("Preempted requests that resume with blocks from a KV tier."),
    "kv_cache_usage_perc": Metric("Used share of the KV blocks, 0..1."),
    "kv_tier_stored_blocks_total": Metric("KV blocks copied to a KV tier.", ("tier",)),
    "kv_tier_loaded_blocks_total": Metric(
        "KV blocks copied back from a KV tier, instead of computing their tokens.", ("tier",)
    ),
    "kv_tier_evicted_blocks_total": Metric("KV blocks that made room for others in a KV tier.", ("tier",)),
    "kv_tier_failed_blocks_total": Metric(
        "KV blocks that a KV tier could not store, or that were damaged when they were loaded.", ("tier",)
    ),
    "kv_tier_bytes": Metric("Bytes of the KV blocks in a KV tier.", ("tier",)),
    "num_blocks": Metric("KV blocks of the pool, by state.", ("state",)),
    "prefix_cache_queries_total": Metric("Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits_total": Metric("Prompt tokens found in the prefix cache."),
    "spec_decode_num_drafts_total": Metric("Guesses that steps have verified, one for a request in a step."),
    "spec_decode_num_draft_tokens_total": Metric("Tokens of these guesses."),
    "spec_decode_num_accepted_tokens_total": Metric("Guessed tokens that were right."),
    "spec_decode_num_accepted_tokens_per_pos_total": Metric(
        "Guessed tokens that were right, by their place in the guess.", ("position",)
    ),
    "prompt_tokens_total": Metric("Prompt tokens computed."),
    "generation_tokens_total": Metric("Tokens sampled."),
    "cached_tokens_total": Metric("Prompt tokens of admitted requests that were found in the prefix cache."),
    "received_tokens_total": Metric("Prompt tokens whose KV was fetched from another worker."),
    "steps_total": Metric("Steps of the engine."),
    "dummy_steps_total": Metric("Empty forward passes for the other ranks of a data-parallel group."),
    "group_steps_total": Metric(
        "Forward passes that this rank made with its data-parallel group, dummies included."
    ),
    "group_calls_total": Metric("Steps that this rank has announced to its data-parallel group."),
    "step_held_seconds_total": Metric(
        "Seconds of delayed and interrupted steps, so that arriving requests could join."
    ),
    "num_preemptions_total": Metric("Requests taken out of the batch to free their blocks."),
    "requests_total": Metric("Requests that this engine received."),
    "requests_finished_total": Metric("Requests that ended without an error."),
    "requests_failed_total": Metric("Requests that ended with an error."),
    "requests_ignored_total": Metric("Requests that ended because they are too large for this engine."),
    "requests_corrupted_total": Metric("Requests that ended because of NaN logits."),
    "transfer_seconds": Metric(
        "Time that a fetched prompt's KV took to cross, from the first read to the verified last block.",
        is_histogram=True,
    ),
    "transfer_exposed_seconds": Metric(
        "The part of that time after the sender had computed the whole prompt, so that the answer waited for it.",
        is_histogram=True,
    ),
    "transfer_size_bytes": Metric("Bytes read for one fetched prompt.", is_histogram=True),
    "transfer_blocks_total": Metric("KV blocks received from other workers.", ("transport",)),
    "transfer_bytes_total": Metric("Bytes of KV received from other workers.", ("transport",)),
    "transfer_needed_blocks_total": Metric("KV blocks that reservations needed beyond the prefix cache."),
    "transfer_failures_total": Metric("Transfers that ended without usable KV, by error kind.", ("kind",)),
    "transfer_fallbacks_total": Metric("Transfers that used a slower path than the chosen one."),
    "transfer_pulled_again_total": Metric(
        "Failed reads that were retried for the same blocks, by retry step.", ("rung",)
    ),
    "transfer_transport_left_total": Metric(
        "Transports that a link no longer uses after consecutive failed transfers.", ("transport",)
    ),
    "transfer_transport_chosen_total": Metric(
        "Links by the transport that their reads use, and the reason for it: only, probed or fallback.",
        ("transport", "reason"),
    ),
    "transfer_digest_mismatches_total": Metric(
        "Blocks whose received bytes did not match the published digest."
    ),
    "transfer_stale_messages_total": Metric(
        "Messages about transfers that are over, or that have never been here."
    ),
    "transfer_converting_links_total": Metric(
        "Links over which KV of another block size or dtype is converted."
    ),
    "transfer_converted_blocks_total": Metric("KV blocks converted from blocks of another size or dtype."),
    "transfer_staging_bytes": Metric("Bytes of memory for blocks that are converted, on the pool's device."),
    "link_handshakes_total": Metric("Handshakes of control links, by result: ok or failed.", ("result",)),
    "leases_active": Metric("Prompts whose KV is under a lease."),
    "leases_expired_total": Metric("Leases that expired without a fetch or a renewal."),
    "lease_age_seconds": Metric(
        "Time for which a prompt's KV was lent, from the request's start here to the end of its lease.",
        is_histogram=True,
    ),
    "transfers_parked": Metric("Fetches of transfers that have not been offered yet."),
    "fetches_active": Metric("Prompts whose KV is being fetched."),
    "transfers_quarantined": Metric("Cancelled fetches with a read that may still write."),
}
"""The metrics of a worker, name without the prefix → metric."""

ROUTER_METRICS: Mapping[str, Metric] = {
    "num_requests_waiting": Metric("Requests without a first token yet."),
    "num_requests_running": Metric("Requests whose answer is being streamed."),
    "worker_restarts_total": Metric(
        "Restarts of workers: a worker that attaches again is another process, or its supervisor reports restarts in "
        "between.",
        ("pool",),
    ),
    "workers": Metric("Attached workers, by role and state.", ("pool", "state")),
    "pool_utilization": Metric(
        "Mean over the serving workers of a role of the used share, 0..1: that of their KV blocks, or of the credit that "
        "this router has of them, whichever is larger.",
        ("pool",),
    ),
    "queue_seconds": Metric(
        "Seconds that a prompt waits for a role now: the time to compute the prompts that are queued at its workers and, "
        "if none of them has room, the time that the oldest request has waited at this router.",
        ("pool",),
    ),
    "scaling_pressure": Metric(
        "Load of a role relative to its goals; 1 is at the goal. It is the largest of utilization / 0.85, queue_seconds / "
        "TTFT goal, and P90 / goal of the last 30 s (TTFT where prompts are computed, ITL where answers are decoded).",
        ("pool",),
    ),
    "desired_workers": Metric(
        "Workers that a role is to have by the last decision of the autoscaler; not published if that is older than 60 s.",
        ("pool",),
    ),
    "scaling_held_workers": Metric(
        "Workers that the autoscaler would add to the desired ones (negative: remove) if nothing held it, by what does: "
        "bounds, budget, flip, stabilizing, in_flight or no_signals.",
        ("pool", "reason"),
    ),
    "scaling_decisions_total": Metric(
        "Decisions of the autoscaler that reached this router, by direction (up, down or none) and reason.",
        ("pool", "direction", "reason"),
    ),
    "scaling_decision_age_seconds": Metric(
        "Seconds since a decision of the autoscaler last reached this router; not published if that is an hour ago."
    ),
    "timing_correction": Metric(
        "Measured times as a multiple of those of the autoscaler's timing model (prefill: prompts, decode: steps).",
        ("pool",),
    ),
    "timing_correction_bounded": Metric(
        "1 if that multiple is at its bound, so that the timing model must be measured again; else 0.",
        ("pool",),
    ),
    "autoscaler_restarts": Metric(
        "How often the autoscaler has failed and begun again, by its last decision; not published if that is older than 60 "
        "s."
    ),
    "autoscaler_lease_refusals_total": Metric(
        "Calls of a further autoscaler for the right to scale the service, which another one has."
    ),
    "slo_attainment": Metric(
        "Share of the requests that ended in the last 60 seconds and met a goal: ttft, itl, or all of them.",
        ("slo",),
    ),
    "slo_requests_total": Metric(
        "Requests by goal (ttft, itl, or all of them) and result: met or missed. A request that failed by no fault of its "
        "client has missed all.",
        ("slo", "result"),
    ),
    "time_to_first_token_seconds": Metric("Time from arrival to the first token.", is_histogram=True),
    "inter_token_latency_seconds": Metric("Time between two tokens of an answer.", is_histogram=True),
    "e2e_request_latency_seconds": Metric("Time from arrival to the last token.", is_histogram=True),
    "request_queue_time_seconds": Metric(
        "Time from arrival to the first token, less the prefill: waits and messages.", is_histogram=True
    ),
    "request_prefill_time_seconds": Metric("Time of computing the prompt.", is_histogram=True),
    "request_transfer_time_seconds": Metric("Exposed time of the KV transfer.", is_histogram=True),
    "request_decode_time_seconds": Metric(
        "Time of the first decode step and the rest of the answer.", is_histogram=True
    ),
    "requests_admitted_total": Metric("Requests that were admitted, one for each choice of each prompt."),
    "request_prompt_tokens": Metric("Tokens of the prompt of a finished request.", is_histogram=True),
    "request_uncached_prompt_tokens": Metric(
        "Those of them that were found in no prefix cache, so that they were computed.", is_histogram=True
    ),
    "request_generation_tokens": Metric("Tokens of the answer of a finished request.", is_histogram=True),
    "prompt_tokens_total": Metric("Prompt tokens of finished requests."),
    "key_prompt_tokens_total": Metric(
        "Prompt tokens of finished requests, by the API key's digest: none without a key, other beyond 64 keys.",
        ("key",),
    ),
    "key_cached_tokens_total": Metric("Those of them that were found in a prefix cache.", ("key",)),
    "generation_tokens_total": Metric("Tokens delivered."),
    "request_success_total": Metric("Finished requests.", ("finished_reason",)),
    "request_errors_total": Metric(
        "Requests that ended with an error, by kind; cancelled: by their clients; stopped: by this router, because it had "
        "to stop, or in a batch to make room or with the batch.",
        ("kind",),
    ),
    "request_replays_total": Metric(
        "Failed attempts that were followed by another, by error kind.", ("kind",)
    ),
    "request_local_recomputes_total": Metric("Attempts whose prompt a decode worker computed itself."),
    "recomputed_prompts_total": Metric(
        "Prompts that were computed once more or in the wrong place: for another attempt (replay), or by a decode worker "
        "because no pair could hand KV over (local). Their share of kvbaton_requests_admitted_total shows a hand-over that "
        "fails again and again.",
        ("reason",),
    ),
    "recomputed_prompt_tokens_total": Metric("The tokens of these prompts.", ("reason",)),
    "failed_pairs": Metric(
        "Pairs of attached workers that cannot hand KV over, by the kind of their last error: peer_unreachable, "
        "incompatible (until one of them starts anew) or transfer_failed.",
        ("kind",),
    ),
    "routing_decisions_total": Metric(
        "Requests that were bound to workers, by their legs: prefill+decode, aggregated, embed, or decode (a moved answer).",
        ("kind",),
    ),
    "drains_total": Metric(
        "Drains of workers, by result: empty, moved (legs were left at the deadline), undone or lost.",
        ("result",),
    ),
    "drain_seconds": Metric("Time from the beginning of a worker's drain to its result.", is_histogram=True),
    "migrations_total": Metric(
        "Moves of answers to another worker while they are decoded, by result: moved, ended (the answer was over first), "
        "refused (it stays), no_target, or replayed (its KV is computed again); and by reason: drain or flip.",
        ("result", "reason"),
    ),
    "migration_pause_seconds": Metric(
        "Time between the last token of an answer before a move and the first one after it.",
        is_histogram=True,
    ),
    "flips_total": Metric("Workers that have taken another role, by this role.", ("role",)),
    "num_batches": Metric("Stored batches, by status.", ("status",)),
    "num_file_bytes": Metric("Bytes of stored files, with uploads and results of open batches."),
    "batch_requests_total": Metric(
        "Requests of batches, by outcome: completed, failed, expired, retried or stopped.", ("result",)
    ),
}
"""The metrics of a router, in the same form."""
