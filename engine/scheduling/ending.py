"""The states of a request, and the ways in which it ends."""

from dataclasses import dataclass
from enum import Enum, auto

from contract.errors import SIZE_PARAM, ErrorKind, KvbatonError
from contract.outputs import FinishReason


class RequestStatus(Enum):
    """The life of a request.

    WAITING: for its first step (or, with KV that has arrived, for a place in the batch). WAITING_FOR_FSM: for its
    grammar. WAITING_FOR_REMOTE_KVS: for KV that another worker computes. PREEMPTED: lost its blocks, will recompute.
    """

    WAITING = auto()
    WAITING_FOR_FSM = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()
    FINISHED_IGNORED = auto()

    @property
    def is_finished(self) -> bool:
        """True when nothing more will happen to the request."""
        return self in _REASONS


_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.ERROR,
}


@dataclass(frozen=True)
class Ending:
    """How a request ends on this engine. ``goes_on`` is True when the answer continues on another worker.

    error_param: the request's field that is at fault.
    """

    status: RequestStatus
    stop_reason: int | None = None
    error_kind: str | None = None
    error_message: str | None = None
    error_param: str | None = None
    goes_on: bool = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """What the client is told; None when the answer goes on elsewhere."""
        if self.goes_on:
            return None
        return FinishReason.ERROR if self.error_kind else _REASONS[self.status]


HANDED_OVER = Ending(RequestStatus.FINISHED_LENGTH_CAPPED, goes_on=True)
"""The prefill leg is done with its one token; the decode leg goes on."""

ABORTED = Ending(RequestStatus.FINISHED_ABORTED)
"""Nobody wants it any more."""

NOT_NEEDED = Ending(RequestStatus.FINISHED_ABORTED, goes_on=True)
"""The decode leg is not needed: token 0 ended the answer, and the prefill leg has said so."""


def ended_by_error(kind: str, message: str, param: str | None = None) -> Ending:
    """The request ends with an error instead of an answer."""
    return Ending(RequestStatus.FINISHED_ABORTED, error_kind=kind, error_message=message, error_param=param)


def ended_by(error: KvbatonError) -> Ending:
    """Return how a request ends by this error."""
    return ended_by_error(error.kind, error.message, error.param)


def ended_late(status: RequestStatus, seconds: float) -> Ending:
    """The request has not left this state (or not ended) within ``seconds``."""
    where = status.name.lower()
    message = f"not done after {seconds:g} s, while {where}; the deadline was set for this"
    return ended_by_error(ErrorKind.DEADLINE, message)


def refused(message: str) -> Ending:
    """The request can never run here. ``param`` shows that its size is at fault: a larger engine may run it."""
    kind = ErrorKind.INVALID_REQUEST
    return Ending(
        RequestStatus.FINISHED_IGNORED, error_kind=kind, error_message=message, error_param=SIZE_PARAM
    )
