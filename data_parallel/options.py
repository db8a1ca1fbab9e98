"""A data-parallel group in settings, and a rank's place in it. Imported where settings are read: without gRPC and torch."""

from dataclasses import dataclass

from pydantic import Field

from contract.options import Options

_LOOK_AHEAD = 24
_TIMEOUT_SECONDS = 2.0


class GroupOptions(Options):
    """The rules by which the ranks of a group keep in step (``data_parallel_size`` is an option of the engine)."""

    data_parallel_look_ahead: int = Field(default=_LOOK_AHEAD, ge=0, le=10_000)
    """Steps beyond an announced one that a group makes without asking: more of them need fewer calls between the ranks, and
    leave more empty steps after the last request."""
    data_parallel_timeout_seconds: float = Field(default=_TIMEOUT_SECONDS, gt=0)
    """Silence of a rank after which the whole group ends and is started again."""


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """A rank's place in its group. Can be pickled.

    address: "host:port" of the coordinator, which rank 0 serves. listen_host: where this rank's own port is opened. host:
    where the others reach it. look_ahead: see CoordinatorSteps. timeout_seconds: silence after which a process counts as
    gone. join_seconds: the longest wait for the other ranks. shares_memory: announce steps in shared memory if all ranks
    run on one machine (``SharedSteps``).
    """

    dp_rank: int
    dp_size: int
    address: str
    listen_host: str
    host: str
    secret: str
    look_ahead: int = _LOOK_AHEAD
    timeout_seconds: float = _TIMEOUT_SECONDS
    join_seconds: float = 120.0
    shares_memory: bool = True
