"""The outcome of an attempt: what workers report beside the tokens, and its failure.

An earlier leg may still make the failure of a later one irrelevant.
"""

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec

from contract.errors import DeadlineError, KvbatonError, WorkerLostError
from contract.outputs import EngineOutput, TokenLogprobs, TransferReport
from router.attempts.attempt_legs import Leg
from router.workers.attached_worker import AttachedWorker


class LegReport(msgspec.Struct):
    """Measured seconds, prompt tokens found in a cache, and the prompt's log probabilities."""

    queue_seconds: float = 0.0
    held_seconds: float = 0.0
    prefill_seconds: float = 0.0
    transfer: TransferReport = TransferReport()
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = []

    def add(self, output: EngineOutput, *, has_transfer: bool) -> None:
        """Add the report of a worker. has_transfer: the output's leg waited for the KV before the second token.

        The report of a replay counts only if the replay computed the first token, or the second one.
        """
        if output.first_index == 0 and output.num_cached_tokens is not None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        if output.timings is not None:
            if output.first_index == 0:
                self.queue_seconds = output.timings.queue_seconds
                self.held_seconds = output.timings.held_seconds
                self.prefill_seconds = output.timings.prefill_seconds
            if has_transfer:
                self.transfer = output.timings.transfer


_FIRST_TOKEN_SECONDS = 1.0
"""The time for which a leg's failure waits for an earlier leg's token, which may end the answer."""


class WorkerDrainedError(WorkerLostError):
    """A worker drains, and has given a leg up: it begins again on another worker, and nothing has failed."""


@dataclass(frozen=True)
class Failure:
    """The failure of an attempt. failed_worker: its leg failed. failed_workers: all workers that may be at fault."""

    error: KvbatonError
    failed_worker: AttachedWorker
    failed_workers: frozenset[AttachedWorker]

    def after(self, earlier: "Failure") -> "Failure":
        """Return this failure with the failed workers of an earlier one of the same attempt."""
        return replace(self, failed_workers=self.failed_workers | earlier.failed_workers)


def for_client(error: KvbatonError, workers: Iterable[str]) -> KvbatonError:
    """Return the error of an attempt with these workers without their names, which are the operator's concern."""
    named = "|".join(re.escape(worker) for worker in sorted(workers, key=len, reverse=True))
    if named:
        message = re.sub(rf"^worker (?:{named}): ", "", error.message)
        error.message = re.sub(rf"\b(?:worker )?(?<![\w-])(?:{named})(?![\w-])", "a worker", message)
        error.args = (error.message,)
    return error


def deadline_error(num_delivered: int) -> DeadlineError:
    """Return the error of a request whose deadline has passed."""
    return DeadlineError(f"the request ran into its deadline with {num_delivered} tokens delivered")


class PostponedFailure:
    """The failure of a leg whose part of the answer may not be needed. ``on_late`` ends the attempt with it.

    is_last_token: the token that is still to come is the whole rest of the answer, so that it is waited for without limit.
    """

    def __init__(
        self, failure: Failure, leg: Leg, on_late: Callable[[Failure], None], *, is_last_token: bool
    ) -> None:
        self.failure = failure
        self.leg = leg
        self._timer: asyncio.TimerHandle | None = None
        if not is_last_token:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_FIRST_TOKEN_SECONDS, on_late, failure)

    def cancel(self) -> None:
        """Stop the timer."""
        if self._timer:
            self._timer.cancel()
