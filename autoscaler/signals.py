"""The figures that the law reads every few seconds."""

from dataclasses import dataclass

from contract.identity import Role

POOLS = (Role.PREFILL, Role.DECODE)
"""The pools that the law scales. Aggregated workers are not scaled."""

RATE_SECONDS = 20.0
"""Seconds of arrivals in a reading of the rate."""
LATENCY_SECONDS = 30.0
"""Seconds whose latencies are in a reading."""
LENGTH_SECONDS = 180.0
RECENT_SECONDS = 60.0
ENOUGH_REQUESTS = 100
"""If as many requests end within ``RECENT_SECONDS``, only their lengths count; else those of ``LENGTH_SECONDS``."""


@dataclass(frozen=True, kw_only=True)
class PoolSignals:
    """The workers of one pool.

    num_ready: workers that take requests. starting_ages: seconds since each worker that is not ready yet was ordered.
    num_draining: workers that end their work and leave. num_keepable: those of them that the autoscaler has drained, which
    may serve again; the others are those of operators. num_changing: workers that were ordered to take another role and
    have not taken it. num_in_flight: prompts that are bound to the ready workers, or answers that they decode.
    max_in_flight: those that they take at once. max_tokens: tokens that their KV pools hold. is_full: none of them takes
    another one.
    """

    num_ready: int = 0
    starting_ages: tuple[float, ...] = ()
    num_draining: int = 0
    num_keepable: int = 0
    num_changing: int = 0
    num_in_flight: float = 0.0
    max_in_flight: int = 0
    max_tokens: int = 0
    is_full: bool = False

    @property
    def num_existing(self) -> int:
        """The workers that occupy devices, in whatever state."""
        return self.num_ready + len(self.starting_ages) + self.num_draining + self.num_changing


@dataclass(frozen=True, kw_only=True)
class LoadSignals:
    """The requests of the last seconds, as the routers have counted them.

    arrival_rate: requests per second. prompt_tokens: mean; uncached_prompt_tokens: mean of those that no prefix cache had;
    uncached_prompt_tokens_p90: 90th percentile of them. answer_tokens: mean. ttft_p90: seconds from the arrival to the first
    token; None without a sample. itl_p90: seconds between two tokens of an answer. queue_seconds: for which the oldest of
    the requests without workers has waited. num_waiting: these requests. step_seconds: mean of the workers' steps that only
    continue answers. prefill_seconds_per_token: mean of those that compute prompts.
    """

    arrival_rate: float
    prompt_tokens: float = 0.0
    uncached_prompt_tokens: float = 0.0
    uncached_prompt_tokens_p90: float = 0.0
    answer_tokens: float = 0.0
    ttft_p90: float | None = None
    itl_p90: float | None = None
    queue_seconds: float = 0.0
    num_waiting: int = 0
    step_seconds: float | None = None
    prefill_seconds_per_token: float | None = None


@dataclass(frozen=True, kw_only=True)
class Signals:
    """Everything that a decision is made from.

    time: seconds on a clock that never goes back. load: None while no router or no launcher answers. start_seconds: the
    median time of recent starts of workers; None before the first one. num_starts: ordered starts until now whose end was
    seen; 0 while the first one goes on.
    """

    time: float
    prefill: PoolSignals
    decode: PoolSignals
    load: LoadSignals | None
    start_seconds: float | None = None
    num_starts: int = 0

    def pool(self, role: Role) -> PoolSignals:
        """Return the workers of a pool."""
        return self.prefill if role is Role.PREFILL else self.decode
