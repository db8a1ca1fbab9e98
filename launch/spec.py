"""What a supervisor is given for each process: how it is started, and what it needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.errors import SettingError
from contract.identity import Role

Facts = dict[str, Any]
"""What a child says when it is ready: addresses ("http", "grpc", "internal", "admin" as "host:port") and "pid"."""


@dataclass(frozen=True)
class ProcessSpec:
    """What to start.

    command: known facts by process name → argv; the facts hold every process that was ever ready, this one's earlier
    life included, so that a restart can take the same ports. needs: names of the processes that must be ready first.
    env: the child's whole environment, None passes on the supervisor's own. drain_seconds: how long it may go on working
    after it was asked to stop, beside the supervisor's grace.
    """

    name: str
    role: Role
    command: Callable[[Mapping[str, Facts]], list[str]]
    needs: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    drain_seconds: float = 0.0


def check_specs(specs: Sequence[ProcessSpec]) -> None:
    """Raise SettingError where two have one name, or one needs a process that is not among them."""
    names = sorted(spec.name for spec in specs)
    if len(set(names)) < len(names):
        raise SettingError(f"two processes share a name; each needs one of its own: {', '.join(names)}")
    for spec in specs:
        if missing := sorted(set(spec.needs) - set(names)):
            raise SettingError(
                f"{spec.name} needs {missing[0]}, which is not there; there are {', '.join(names)}"
            )
