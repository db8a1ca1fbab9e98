"""The states of a batch and the transitions between them, as pure functions.

    VALIDATING ──▶ IN_PROGRESS ──▶ FINALIZING ──▶ COMPLETED
        │  │            │  │            └───────▶ EXPIRED
        │  └────────────│──┴─ (expiry) ─▶ FINALIZING
        ├──▶ FAILED     │
        └───────────────┴──▶ CANCELLING ──▶ CANCELLED

Each function returns the record in the next state, or raises ``WrongStateError`` in a state that it does not start from.
"""

from collections.abc import Sequence

from msgspec import structs

from router.batches.records import BatchRecord, BatchStatus, Counts, LineProblem


class WrongStateError(Exception):
    """A transition that the state of the batch does not allow."""


def begin(batch: BatchRecord, total: int, now: int) -> BatchRecord:
    """Begin to answer the input, which has ``total`` valid lines."""
    _require(batch, BatchStatus.VALIDATING)
    return structs.replace(
        batch, status=BatchStatus.IN_PROGRESS, in_progress_at=now, counts=Counts(total=total)
    )


def reject(batch: BatchRecord, problems: Sequence[LineProblem], now: int) -> BatchRecord:
    """Fail the batch because its input is not valid."""
    _require(batch, BatchStatus.VALIDATING)
    return structs.replace(batch, status=BatchStatus.FAILED, failed_at=now, errors=tuple(problems))


def can_cancel(batch: BatchRecord) -> bool:
    """Return True if ``cancel`` may be called."""
    return batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


def cancel(batch: BatchRecord, now: int) -> BatchRecord:
    """Stop answering for the owner; answers that are written are kept."""
    _require(batch, BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
    return structs.replace(batch, status=BatchStatus.CANCELLING, cancelling_at=now)


def finalize(batch: BatchRecord, now: int) -> BatchRecord:
    """Finish answering: every request has its result."""
    _require(batch, BatchStatus.IN_PROGRESS)
    return structs.replace(batch, status=BatchStatus.FINALIZING, finalizing_at=now)


def expire(batch: BatchRecord, now: int) -> BatchRecord:
    """Stop answering at the end of the completion window; each remaining request gets an error line."""
    _require(batch, BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
    return structs.replace(batch, status=BatchStatus.FINALIZING, finalizing_at=now, is_expiring=True)


def end(batch: BatchRecord, now: int, *, counts: Counts) -> BatchRecord:
    """End the batch, whose result files are complete."""
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
