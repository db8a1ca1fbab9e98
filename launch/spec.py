"""The description from which a supervisor starts a process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.errors import SettingError
from contract.identity import Role

Facts = dict[str, Any]
"""The facts that a child reports when it is ready: addresses ("http", "grpc", "internal", "admin" as "host:port"), "pid"."""


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start.

    command: maps facts by process name to argv; the facts include every process that was ever ready, also an earlier run of
    this one, so that a restart can use the same ports. needs: names of the processes that must be ready first. env: the
    child's complete environment; None: the supervisor's own. drain_seconds: time to finish work after SIGTERM, in addition
    to the supervisor's grace.
    """

    name: str
    role: Role
    command: Callable[[Mapping[str, Facts]], list[str]]
    needs: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    drain_seconds: float = 0.0


def check_specs(specs: Sequence[ProcessSpec]) -> None:
    """Raise SettingError if two specs have the same name, or if one needs a process that is not among them."""
    names = sorted(spec.name for spec in specs)
    if len(set(names)) < len(names):
        raise SettingError(f"two processes have the same name; each needs its own: {', '.join(names)}")
    for spec in specs:
        if missing := sorted(set(spec.needs) - set(names)):
            raise SettingError(
                f"{spec.name} needs {missing[0]}, which does not exist; the processes are {', '.join(names)}"
            )
