"""The step numbers of a group of data-parallel ranks. Pure: no thread, no network.

The layers of a mixture-of-experts model exchange tokens between the ranks, so every rank makes every forward pass: the n-th
pass of each rank meets the n-th pass of all others, and a rank without requests makes it with an empty batch. Routers and
KV connectors, which submit requests, take no part in that. Instead each rank counts its passes (``local_step``) and has
the number up to which the group goes (``coord_step``):

- A rank that is about to pass ``coord_step`` announces the number of its step to the coordinator.
- The coordinator advances to that step plus a look-ahead, and announces the new number to all ranks.
- A rank whose ``local_step`` is behind makes an empty step, until it has caught up.

So a group that works sends one call in ``look_ahead + 1`` steps; after its last step of work it makes up to ``look_ahead``
empty ones, and then all its ranks wait for input.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from contract.errors import InvalidRequestError


class PartInfo(NamedTuple):
    """A registered rank, and where its participant is called. machine: equal for ranks that can share memory, if known."""

    dp_rank: int
    host: str
    port: int
    machine: str = ""


@dataclass
class CoordinatorSteps:
    """The state of a coordinator. ``step``: all ranks take part in the steps up to this one.

    look_ahead: how many steps beyond an announced one the group goes.
    """

    dp_size: int
    look_ahead: int
    step: int = 0
    parts: dict[int, PartInfo] = field(default_factory=dict)
    _left: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        """True once every rank is registered."""
        return len(self.parts) == self.dp_size

    @property
    def is_on_one_machine(self) -> bool:
        """True if all registered ranks can share memory."""
        machines = {info.machine for info in self.parts.values()}
        return len(machines) == 1 and "" not in machines

    @property
    def is_over(self) -> bool:
        """True once every rank has left."""
        return len(self._left) == self.dp_size

    def reg_part(self, info: PartInfo, dp_size: int) -> None:
        """Register a rank. Raises InvalidRequestError if its place is taken or not one of this group."""
        if dp_size != self.dp_size or not 0 <= info.dp_rank < self.dp_size:
            raise InvalidRequestError(
                f"rank {info.dp_rank} of {dp_size} does not belong to this group of {self.dp_size}",
                param="dp_rank",
            )
        if taken := self.parts.get(info.dp_rank):
            raise InvalidRequestError(
                f"rank {info.dp_rank} of the group is registered already, at {taken.host}:{taken.port}",
                param="dp_rank",
            )
        self.parts[info.dp_rank] = info

    def advance(self, step: int) -> bool:
        """Advance for a rank that has announced ``step``; return whether ``self.step`` has grown."""
        if step <= self.step:
            return False
        self.step = step + self.look_ahead
        return True

    def leave(self, dp_rank: int) -> None:
        """Note that a rank starts no step of its own any more."""
        self._left.add(dp_rank)


@dataclass
class ParticipantSteps:
    """The state of a rank. Used in the engine's thread only: the coordinator's numbers come there through the input.

    local_step: the rank's last forward pass, which runs or has ended. coord_step: the group's last one, as far as known.
    """

    local_step: int = 0
    coord_step: int = 0

    @property
    def is_behind(self) -> bool:
        """True while other ranks make steps in which this one has to take part."""
        return self.local_step < self.coord_step

    def new_step(self) -> int | None:
        """Count a forward pass that starts now; return its number if it has to be announced."""
        self.local_step += 1
        return self.local_step if self.local_step > self.coord_step else None

    def start_step(self, step: int) -> None:
        """Take part in the steps up to this one. Messages may overtake each other: the number only grows."""
        self.coord_step = max(self.coord_step, step)
