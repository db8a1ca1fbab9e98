"""The state of a worker between its start and its end, and the role in which it serves."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from contract.errors import UnavailableError
from contract.identity import Role


class WorkerState(StrEnum):
    """STARTING: no router has accepted the worker yet. LEFT: it accepts nothing more, and its process ends."""

    STARTING = "starting"
    SERVING = "serving"
    LEFT = "left"


class LegCall(StrEnum):
    """The calls by which a router starts a leg, with the names of ``protos/worker.proto``."""

    PREFILL = "Prefill"
    DECODE = "Decode"
    EMBED = "Embed"


_SERVED: Mapping[Role, frozenset[LegCall]] = MappingProxyType(
    {
        Role.PREFILL: frozenset({LegCall.PREFILL, LegCall.EMBED}),
        Role.DECODE: frozenset({LegCall.DECODE}),
        Role.AGGREGATED: frozenset({LegCall.DECODE, LegCall.EMBED}),
    }
)
"""The calls that a worker of each role serves. A decode leg without a source computes its prompt itself."""


class Lifecycle:
    """Owns the state and the role of one worker: STARTING → SERVING → LEFT."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.state = WorkerState.STARTING

    def attached(self) -> None:
        """Record that a router has accepted the worker."""
        if self.state is WorkerState.STARTING:
            self.state = WorkerState.SERVING

    def leave(self) -> None:
        """Accept nothing more, for good."""
        self.state = WorkerState.LEFT

    def serves(self, call: LegCall) -> bool:
        """Return True if the current role serves this call."""
        return call in _SERVED[self.role]

    def check_open(self) -> None:
        """Raise UnavailableError if the worker accepts no leg because its process ends."""
        if self.state is WorkerState.LEFT:
            raise UnavailableError("the worker is stopping")
