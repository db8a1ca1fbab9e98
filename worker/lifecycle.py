"""The state of a worker between its start and its end, and the role in which it serves."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from msgspec.structs import replace

from contract.errors import UnavailableError
from contract.identity import Role
from contract.membership import Credit


class WorkerState(StrEnum):
    """The states of a worker.

    STARTING: no router has accepted the worker yet. DRAINING: legs that are bound continue, and no new ones are. LEFT: it
    accepts nothing more, and its process ends.
    """

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    LEFT = "left"


class LegCall(StrEnum):
    """The kinds of leg that a router orders on a worker's stream."""

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
    """Owns the state and the role of one worker: STARTING → SERVING ⇄ DRAINING → LEFT.

    is_stopping: the worker's process is to end, so that a drain cannot be undone. num_drains: drains that were begun.
    role_epoch: that of the last change of the role; 0 while the worker has the role in which it started. next_role: the
    role that the worker is to take as soon as every router binds no leg by this one. is_unsettled: it may lend and fetch at
    once.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self.role_epoch = 0
        self.state = WorkerState.STARTING
        self.is_stopping = False
        self.num_drains = 0
        self.next_role: Role | None = None
        self.is_unsettled = False
        self._former_role = role

    @property
    def is_draining(self) -> bool:
        """True from the beginning of a drain until it is undone, or the worker leaves."""
        return self.state is WorkerState.DRAINING

    def attached(self) -> None:
        """Record that a router has accepted the worker."""
        if self.state is WorkerState.STARTING:
            self.state = WorkerState.SERVING

    def drain(self) -> None:
        """Begin to drain. Raises UnavailableError if the worker has left."""
        self.check_open()
        self.state = WorkerState.DRAINING
        self.num_drains += 1

    def undrain(self) -> None:
        """Serve again; does nothing without a drain. Raises UnavailableError if the process is to end."""
        if self.is_stopping:
            raise UnavailableError("the worker is stopping; its drain cannot be undone")
        if self.is_draining:
            self.state = WorkerState.SERVING

    def leave(self) -> None:
        """Accept nothing more, for good."""
        self.is_stopping = True
        self.state = WorkerState.LEFT

    def take_role(self, role: Role, epoch: int) -> None:
        """Serve in this role from now on. If it is another one, the worker ends what was begun by the former one."""
        self.is_unsettled = self.is_unsettled or role is not self.role
        self._former_role = self.role
        self.role = role
        self.role_epoch = epoch
        self.next_role = None

    def credit(self, full: Credit) -> Credit:
        """Return the credit to offer: that of one role at a time (law 4), or nothing while the worker closes or drains."""
        if self.is_draining:
            return Credit(is_draining=True, is_unsettled=self.is_unsettled)
        if self.next_role:
            return Credit(next_role=self.next_role.value)
        return replace(full, is_unsettled=self.is_unsettled)

    def serves(self, call: LegCall) -> bool:
        """Return True if the role serves this call, or the former one did and may have legs on their way."""
        return call in _SERVED[self.role] or (self.is_unsettled and call in _SERVED[self._former_role])

    def check_open(self) -> None:
        """Raise UnavailableError if the worker accepts no leg because its process ends.

        A draining worker accepts legs: its router may have sent them before it received the credit of the drain.
        """
        if self.state is WorkerState.LEFT:
            raise UnavailableError("the worker is stopping")
