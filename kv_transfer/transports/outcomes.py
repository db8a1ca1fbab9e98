"""What the caller of a read is told of an error beneath it: one meaning for every transport that asks its sender."""

from contract.errors import PeerUnreachableError, TransferError, WorkerLostError
from kv_transfer.links.framing import ShortReadError
from kv_transfer.protocol.reads import Read, ReadStoppedError, Source, StaleLeaseError, broken_connection


def as_outcome(
    error: Exception, source: Source, read: Read, connection: str = "data connection"
) -> Exception:
    """A stale lease stays one, a stopped read is only stopped, and a sender whose ``connection`` fails is out of reach."""
    if isinstance(error, StaleLeaseError):
        return error
    if read.is_stopped:
        return ReadStoppedError("the read was stopped")
    if isinstance(error, (ShortReadError, ConnectionError)):
        return PeerUnreachableError(f"worker {source.worker_id} closed its {connection}: {error}")
    if isinstance(error, (TransferError, WorkerLostError)):
        return error
    message = f"reading from worker {source.worker_id} failed: {error}"
    return broken_connection(error, message) if isinstance(error, OSError) else TransferError(message)
