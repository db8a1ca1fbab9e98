"""The tasks and descriptors of the processes of an idle service: they grow when something leaks.

A decode worker connects to a prefill worker when a request first uses both, and keeps the connection. So the number of all
descriptors of a process grows until every pair has met. What a process has open for a peer is therefore compared with what
workers of its role had open for such a peer before: a first connection is no leak, a second one is.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.held_resources import State
from tests.chaos.pool.descriptors import Kinds, descriptors_by_peer, grown


def _role(name: str) -> str:
    """Return the role of a process: its name begins with it."""
    return name.partition("-")[0]


@dataclass(frozen=True)
class Footprint:
    """Numbers of each process. descriptors: by process and by the process that they are for."""

    tasks: Mapping[str, int]
    descriptors: Mapping[str, Mapping[str, Kinds]]

    @classmethod
    def of(cls, states: Mapping[str, State], pids: Mapping[str, Sequence[int]]) -> "Footprint":
        """Count now. pids: each process with those that it has started."""
        tasks = {name: state["process"]["num_asyncio_tasks"] for name, state in states.items()}
        return cls(tasks, descriptors_by_peer(pids))

    def beyond(self, before: "Footprint") -> dict[str, dict[str, Any]]:
        """Return what each process has more than before, as (before, now)."""
        found: dict[str, dict[str, Any]] = {}
        for name, by_peer in self.descriptors.items():
            more: dict[str, Any] = {
                f"for {peer}": kinds
                for peer, now in by_peer.items()
                if (kinds := grown(now, before._most(name, peer)))
            }
            if self.tasks[name] > before.tasks[name]:
                more["tasks"] = (before.tasks[name], self.tasks[name])
            if more:
                found[name] = more
        return found

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the numbers as plain data."""
        return {
            name: {"tasks": self.tasks[name], "descriptors": sum(map(Counter.total, by_peer.values()))}
            for name, by_peer in self.descriptors.items()
        }

    def _most(self, name: str, peer: str) -> Kinds:
        """Return the most of each kind that a process may have for a peer, itself included."""
        if name == peer:
            return self.descriptors[name][name]
        alike = [
            kinds
            for other, by_peer in self.descriptors.items()
            for its_peer, kinds in by_peer.items()
            if other != its_peer and (_role(other), _role(its_peer)) == (_role(name), _role(peer))
        ]
        return Counter({kind: max(each[kind] for each in alike) for kinds in alike for kind in kinds})
