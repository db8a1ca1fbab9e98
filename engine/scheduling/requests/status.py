"""The states of a request in the scheduler."""

from enum import Enum, auto


class RequestStatus(Enum):
    """The stages of a request's life.

    WAITING: for its first step (or, with KV that has arrived, for a place in the batch). WAITING_FOR_FSM: for its
    grammar. WAITING_FOR_REMOTE_KVS: for KV that another worker computes. PREEMPTED: it lost its blocks and will be
    recomputed. FINISHED_IGNORED: it was refused, because it can never run here.
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
