"""The attempt that runs, for one answer, and what may take its place while it runs."""

from typing import Protocol

from contract.errors import WorkerLostError
from contract.outputs import RequestTimings
from router.attempts.attempt import Attempt
from router.attempts.attempt_legs import AttemptLegs
from router.attempts.leg_outcome import Failure
from router.attempts.leg_requests import AttemptTask
from router.workers.capacity import CreditHold


class RunMigration(Protocol):
    """A migration of the answer (``router/migration/migration.py``), as far as the events of its attempts matter to it."""

    def on_source_ended(self, num_tokens: int) -> None:
        """Continue elsewhere (``CurrentAttempt.swap``): the source lends the KV of ``num_tokens`` tokens but the last."""

    def on_target_began(self, timings: RequestTimings | None) -> None:
        """Take note of the target's first token. timings: what the target reports with it."""

    def on_target_failed(self, failure: Failure) -> bool:
        """Return True if another target is to continue the answer."""

    def on_attempt_ended(self, failure: Failure | None) -> None:
        """Take note that the answer has ended, or that its attempt has failed."""


class CurrentAttempt:
    """Owns the attempt that runs, and the numbers of attempts. Fulfils ``AttemptOwner``.

    migration: that of the answer to another worker, from the order to the source until it is over. Attempts
    have no part in it: their events reach it here, and it puts another attempt or another last leg in place.
    """

    def __init__(self) -> None:
        self.attempt: Attempt | None = None
        self.migration: RunMigration | None = None
        self.num_attempts = 0

    def close(self) -> None:
        """End the attempt. Does nothing the second time."""
        if self.attempt:
            self.attempt.close()  # still the one that runs: its end is the end of a migration
            self.attempt = None

    def next_number(self) -> int:
        """Return the number of the next attempt, which no other one will have."""
        self.num_attempts += 1
        return self.num_attempts - 1

    def return_number(self, number: int) -> None:
        """Use a number again that no worker has seen. Does nothing if a later one is taken."""
        if number == self.num_attempts - 1:
            self.num_attempts = number

    def swap(self, task: AttemptTask, legs: AttemptLegs, hold: CreditHold) -> Attempt:
        """Replace the attempt, whose last leg was handed off, by another one, which takes its output over; return that.

        The first of ``legs`` stands for the lease, with the credit of the leg that was handed off. hold: the credit for the
        other one.
        """
        former = self.attempt
        assert former is not None, "its last leg was handed off"
        lent = former.legs.last.detach_hold()
        self.attempt = Attempt(task, legs, former.report, former.output, self)
        former.settle()
        self.attempt.bind([lent, hold])
        return self.attempt

    def on_handed_off(self, attempt: Attempt, num_tokens: int) -> None:
        """See ``AttemptOwner``. Raises WorkerLostError if nothing is reserved for the rest of the answer."""
        if self.migration is None:
            raise WorkerLostError(
                f"worker {attempt.legs.last.worker.name} has handed the request off after {num_tokens} tokens, "
                "and it is not moved"
            )
        self.migration.on_source_ended(num_tokens)

    def on_last_leg_began(self, timings: RequestTimings | None) -> None:
        """See ``AttemptOwner``."""
        if self.migration:
            self.migration.on_target_began(timings)

    def on_last_leg_failed(self, failure: Failure) -> bool:
        """See ``AttemptOwner``. Only a migration has another worker for the leg, while the KV is lent."""
        return self.migration is not None and self.migration.on_target_failed(failure)

    def on_ended(self, attempt: Attempt) -> None:
        """See ``AttemptOwner``. The end of an attempt that was swapped for another one ends nothing else."""
        if self.migration and attempt is self.attempt:
            self.migration.on_attempt_ended(attempt.failure)
