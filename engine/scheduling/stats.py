"""The scheduler's counters: snapshots for logs, totals for metrics, mean lengths of steps. Plain numbers, cheap to send."""

import msgspec

from engine.outputs import SchedulerOutput

# Weight of the newest step; the last 20 steps dominate.
_WEIGHT = 0.05
# What the share of right drafts is taken to be before the first one: 7 of 10.
_GUESSED_RIGHT = 7
_GUESSED = 10


class PrefixCacheStats(msgspec.Struct, kw_only=True):
    """Use of the prefix cache since the engine started.

    reset: ``reset_prefix_cache`` was called. requests: requests that were looked up. queries, hits: prompt tokens that were
    looked up, and found.
    """

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0

    def record(self, num_tokens: int, num_hits: int) -> None:
        """Record that of a prompt of ``num_tokens`` the first ``num_hits`` were found."""
        self.requests += 1
        self.queries += num_tokens
        self.hits += num_hits


class SpecDecodingStats(msgspec.Struct, kw_only=True):
    """Drafts since the engine started; see ``engine.scheduling.batch.drafting``.

    num_spec_tokens: most drafts of a request in a step (k). num_drafts: drafts of one request in one step, counted once.
    num_draft_tokens, num_accepted_tokens: tokens of these, and those that were equal to the sampled ones.
    num_accepted_tokens_per_pos: the same by their place among a request's drafts, k numbers.
    """

    num_spec_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = msgspec.field(default_factory=list)

    @property
    def acceptance(self) -> float:
        """The share of right drafts, of those before which no other was wrong; while there are few, mostly a guess."""
        num_tested = min(self.num_draft_tokens, self.num_accepted_tokens + self.num_drafts)
        return (self.num_accepted_tokens + _GUESSED_RIGHT) / (num_tested + _GUESSED)

    def record(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Record that of the drafts of a request in a step the first ``num_accepted`` were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        per_pos = self.num_accepted_tokens_per_pos
        per_pos += [0] * (max(num_accepted, self.num_spec_tokens) - len(per_pos))
        for place in range(num_accepted):
            per_pos[place] += 1


class SchedulerStats(msgspec.Struct, kw_only=True):
    """A snapshot of the scheduler.

    kv_cache_usage: 0..1. num_queued_prompt_tokens: tokens of prompts that are not computed yet. num_leases: finished prompts
    whose KV is still lent. num_fetches: requests that wait for KV from another engine. prefill_seconds_per_token,
    step_seconds: see ``StepTimes``. num_corrupted_reqs: requests that ended because of NaN logits.
    num_swapped_reqs: preempted requests that resume with blocks from a KV tier. spec_decoding_stats:
    None unless the engine speculates.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    num_queued_prompt_tokens: int = 0
    num_free_blocks: int = 0
    num_leases: int = 0
    num_fetches: int = 0
    prefill_seconds_per_token: float | None = None
    step_seconds: float | None = None
    prefix_cache_stats: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)
    num_corrupted_reqs: int = 0
    num_swapped_reqs: int = 0
    spec_decoding_stats: SpecDecodingStats | None = None


class Totals(msgspec.Struct, kw_only=True):
    """Counters that only grow, since the engine started.

    num_prefill_tokens: tokens of prompts computed here. num_cached_tokens: tokens of prompts found in the cache.
    num_received_tokens: tokens of prompts whose KV was fetched. num_generated_tokens: tokens emitted.
    num_ignored: failed ones that could never run here (FINISHED_IGNORED).
    """

    num_requests: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_ignored: int = 0
    num_corrupted: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_received_tokens: int = 0
    num_generated_tokens: int = 0
    prefix_cache: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)
    spec_decoding: SpecDecodingStats = msgspec.field(default_factory=SpecDecodingStats)


class StepTimes:
    """Averages steps that compute prompts, and steps that only continue answers. Steps without tokens do not count.

    seconds: mean length of a step that only continues answers; None before the first one. prefill_seconds_per_token: seconds
    of steps that compute prompts, divided by the tokens of these steps; None before the first one.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.prefill_seconds_per_token: float | None = None
        self._prompt_seconds = 0.0
        self._prompt_tokens = 0.0

    def note(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Record a step."""
        num_tokens = scheduled.total_num_scheduled_tokens
        if not scheduled.is_decode_only:
            self._prompt_seconds += _WEIGHT * (seconds - self._prompt_seconds)
            self._prompt_tokens += _WEIGHT * (num_tokens - self._prompt_tokens)
            self.prefill_seconds_per_token = self._prompt_seconds / self._prompt_tokens
        elif num_tokens:
            self.seconds = (
                seconds if self.seconds is None else self.seconds + _WEIGHT * (seconds - self.seconds)
            )
