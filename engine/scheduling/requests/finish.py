"""The states of a request in the scheduler, and the ways in which it finishes on this engine."""

from dataclasses import dataclass
from enum import Enum, IntEnum, auto

from contract.errors import SIZE_PARAM, ErrorKind, KvbatonError
from contract.outputs import FinishReason


class RequestStatus(Enum):
    """The stages of a request's life.

    WAITING: for its first step (or, with KV that has arrived, for a place in the batch). WAITING_FOR_FSM: for its
    grammar. WAITING_FOR_REMOTE_KVS: for KV that another worker computes, or that a tier has. PREEMPTED: it lost its blocks,
    which come from a tier or are recomputed. FINISHED_IGNORED: it was refused, because it can never run here.
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
        """True once nothing more will happen to the request."""
        return self in _FINISHED


_FINISHED = frozenset(
    {
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_ABORTED,
        RequestStatus.FINISHED_IGNORED,
    }
)


class SequenceStatus(IntEnum):
    """A request's status with the numbers of vLLM's first engine. A request above SWAPPED has finished."""

    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_IGNORED = 6

    @classmethod
    def of(cls, status: RequestStatus, *, is_swapped: bool = False) -> "SequenceStatus":
        """Return the view of a status. is_swapped: the request was preempted, and its KV is kept outside the pool."""
        if status in _FINISHED or status is RequestStatus.RUNNING:
            return cls[status.name]
        # Whatever it waits for; one that is recomputed after a preemption waits like a new one.
        return cls.SWAPPED if is_swapped else cls.WAITING

    @property
    def is_finished(self) -> bool:
        """True once nothing more will happen to the request."""
        return self > SequenceStatus.SWAPPED


_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.ERROR,
}


@dataclass(frozen=True)
class Finish:
    """The end of a request on this engine.

    is_stuck: the grammar allows no further token. continues: the answer goes on at another worker. is_handed_off: it does
    because of a ``HandOff``. error_param: the field of the request that is at fault.
    """

    status: RequestStatus
    stop_reason: int | None = None
    error_kind: str | None = None
    error_message: str | None = None
    error_param: str | None = None
    is_stuck: bool = False
    continues: bool = False
    is_handed_off: bool = False

    @classmethod
    def with_error(cls, kind: str, message: str, param: str | None = None) -> "Finish":
        """Return the finish of a request that has an error instead of an answer."""
        return cls(RequestStatus.FINISHED_ABORTED, error_kind=kind, error_message=message, error_param=param)

    @classmethod
    def by(cls, error: KvbatonError) -> "Finish":
        """Return the finish of a request that ``error`` ends."""
        return cls.with_error(error.kind, error.message, error.param)

    @classmethod
    def late(cls, status: RequestStatus, seconds: float) -> "Finish":
        """Return the finish of a request that has not left ``status`` (or not finished) within ``seconds``."""
        where = status.name.lower()
        message = f"not done after {seconds:g} s, while {where}; the deadline was set for this"
        return cls.with_error(ErrorKind.DEADLINE, message)

    @classmethod
    def refused(cls, message: str) -> "Finish":
        """Return the finish of a request that can never run here.

        ``error_param`` shows that its size is at fault: a larger engine may run it.
        """
        return cls(
            RequestStatus.FINISHED_IGNORED,
            error_kind=ErrorKind.INVALID_REQUEST,
            error_message=message,
            error_param=SIZE_PARAM,
        )

    @property
    def reason(self) -> FinishReason | None:
        """The reason that the client receives; None if the answer continues at another worker."""
        if self.continues:
            return None
        if self.is_stuck:
            return FinishReason.GRAMMAR
        return FinishReason.ERROR if self.error_kind else _REASONS[self.status]


HANDED_OVER = Finish(RequestStatus.FINISHED_LENGTH_CAPPED, continues=True)
"""The prefill leg has sampled its one token; the decode leg continues."""

HANDED_OFF = Finish(RequestStatus.FINISHED_STOPPED, continues=True, is_handed_off=True)
"""The request was decoded here so far; its KV is lent to the worker that continues it."""

STUCK = Finish(RequestStatus.FINISHED_LENGTH_CAPPED, is_stuck=True)
"""A part of the answer was delivered, and its grammar allows no further token."""

ABORTED = Finish(RequestStatus.FINISHED_ABORTED)
"""The client has cancelled the request."""

NOT_NEEDED = Finish(RequestStatus.FINISHED_ABORTED, continues=True)
"""The decode leg is not needed: the first token ended the answer, and the prefill leg has reported that."""
