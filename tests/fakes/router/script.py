"""The scripts of scripted workers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from contract.errors import KvbatonError
from contract.outputs import FinishReason
from protos import worker_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class Script:
    """The whole answer to a request, and the failures on the way. Each leg plays its own part of it.

    tokens: cut at the request's max_tokens. finish_reason, stop_reason: of the last token, unless the tokens were cut.
    stall_at: wait for ever before the token with this index. fail_at: end with ``error`` there. die_at: close the worker's
    stream there. gap_at: leave this token out. refuse: reject the leg with this error. is_mute: play the leg, but do not
    acknowledge the order that started it, nor any later one. surplus_tokens: with the last token, so many more are sent
    than the answer has. token_delay_seconds: before each token. tokens_per_step: tokens
    in one message.
    refuse_preparation: answer Prepare with this error.
    refuse_hand_off: answer HandOff with this error. dies_at_hand_off: close the worker's stream instead.
    prompt_logprobs: of the prompt's tokens from the second one on; −1 for those that it lacks. embedding: the answer to an
    embedding leg.
    """

    tokens: Sequence[int] = ()
    finish_reason: FinishReason = FinishReason.STOP
    stop_reason: int | None = None
    stall_at: int | None = None
    fail_at: int | None = None
    error: KvbatonError = field(default_factory=lambda: KvbatonError("an error of the script"))
    die_at: int | None = None
    gap_at: int | None = None
    refuse: KvbatonError | None = None
    is_mute: bool = False
    surplus_tokens: int = 0
    refuse_preparation: KvbatonError | None = None
    refuse_hand_off: KvbatonError | None = None
    dies_at_hand_off: bool = False
    token_delay_seconds: float = 0.0
    tokens_per_step: int = 1
    timings: pb.LegTimings | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[float] = ()
    logprobs: Mapping[int, float] = field(default_factory=dict)
    embedding: Sequence[float] = (0.6, 0.8)

    def has_event_in(self, first: int, size: int) -> bool:
        """Return True if something other than a token happens at one of ``size`` indices from ``first`` on."""
        events = (self.stall_at, self.fail_at, self.die_at, self.gap_at)
        return any(index is not None and first <= index < first + size for index in events)


Writer = Callable[[pb.Task], Script]
"""Returns the script for one choice of a task."""
