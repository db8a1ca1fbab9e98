"""The states of a batch and the ways between them, as pure functions.

    VALIDATING ──▶ IN_PROGRESS ──▶ FINALIZING ──▶ COMPLETED
        │  │            │  │            └───────▶ EXPIRED
        │  └────────────│──┴─ (expiry) ─▶ FINALIZING
        ├──▶ FAILED     │
        └───────────────┴──▶ CANCELLING ──▶ CANCELLED

Each function returns the record of the next state and raises ``WrongStateError`` in a state that it does not start from.
"""

from collections.abc import Sequence

from msgspec import structs

from router.batches.records import BatchRecord, BatchStatus, Counts, LineProblem


class WrongStateError(Exception):
    """A transition from a state that it does not start from."""


def begin(batch: BatchRecord, total: int, now: int) -> BatchRecord:
    """Every line of the input is valid, and there are ``total``."""
    _require(batch, BatchStatus.VALIDATING)
    return structs.replace(
        batch, status=BatchStatus.IN_PROGRESS, in_progress_at=now, counts=Counts(total=total)
    )


def reject(batch: BatchRecord, problems: Sequence[LineProblem], now: int) -> BatchRecord:
    """The input is not valid: nothing of it is answered."""
    _require(batch, BatchStatus.VALIDATING)
    return structs.replace(batch, status=BatchStatus.FAILED, failed_at=now, errors=tuple(problems))


def can_cancel(batch: BatchRecord) -> bool:
    """Whether ``cancel`` may be called."""
    return batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


def cancel(batch: BatchRecord, now: int) -> BatchRecord:
    """The owner wants no further answers; those that are written stay."""
    _require(batch, BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
    return structs.replace(batch, status=BatchStatus.CANCELLING, cancelling_at=now)


def finalize(batch: BatchRecord, now: int) -> BatchRecord:
    """Every request has its result."""
    _require(batch, BatchStatus.IN_PROGRESS)
    return structs.replace(batch, status=BatchStatus.FINALIZING, finalizing_at=now)


def expire(batch: BatchRecord, now: int) -> BatchRecord:
    """The completion window is over; the requests that are left get an error line each."""
    _require(batch, BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
    return structs.replace(batch, status=BatchStatus.FINALIZING, finalizing_at=now, is_expiring=True)


def end(batch: BatchRecord, now: int, *, counts: Counts) -> BatchRecord:
    """The result files are whole."""
    _require(batch, BatchStatus.FINALIZING, BatchStatus.CANCELLING)
    ended = structs.replace(batch, counts=counts)
    if batch.status is BatchStatus.CANCELLING:
        return structs.replace(ended, status=BatchStatus.CANCELLED, cancelled_at=now)
    if batch.is_expiring:
        return structs.replace(ended, status=BatchStatus.EXPIRED, expired_at=now)
    return structs.replace(ended, status=BatchStatus.COMPLETED, completed_at=now)


def _require(batch: BatchRecord, *allowed: BatchStatus) -> None:
    if batch.status not in allowed:
        raise WrongStateError(f"batch {batch.id} is {batch.status}, not {' or '.join(allowed)}")
