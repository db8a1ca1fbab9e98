"""The start of every single-service command: settings, parent process, logs, ready line."""

import json
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from contract.errors import KvbatonError
from contract.identity import Role
from launch.arguments import parse
from launch.settings import ServiceSettings
from serving import event_loop
from serving.descriptors import raise_descriptor_limit
from serving.logs import configure_logs
from serving.parent import die_with_parent

logger = logging.getLogger(__name__)

OnReady = Callable[[dict[str, Any]], None]
C = TypeVar("C", bound=ServiceSettings)


def enter_service(command: type[C], role: Role, arguments: Sequence[str]) -> C:
    """Read the settings, make the process end with its parent, configure its logs, raise its limit of open files."""
    settings = parse(command, f"kvbaton {role.value}", arguments)
    if settings.parent_pid is not None:
        die_with_parent(settings.parent_pid)
    configure_logs(getattr(settings, "worker_id", None) or role.value, settings.log_level)
    raise_descriptor_limit()
    return settings


def run_service(settings: C, serve: Callable[[C, OnReady], Awaitable[None]]) -> None:
    """Run a service's entry point until it ends. A supervisor that waits for it gets the error of its start."""

    async def run() -> None:
        await serve(settings, _announcer(settings.ready_fd))

    try:
        event_loop.run(run())
    except KvbatonError as error:
        if settings.ready_fd is not None:
            with suppress(OSError):  # the supervisor waits no longer
                os.write(settings.ready_fd, json.dumps({"error": error.message}).encode() + b"\n")
        raise


def _announcer(ready_fd: int | None) -> OnReady:
    """Return the function that a service calls when it is ready: it logs that and notifies a supervisor."""
    if ready_fd is not None:
        os.set_inheritable(ready_fd, False)

    def announce(facts: dict[str, Any]) -> None:
        event_loop.freeze_objects()
        logger.info("ready: %s", facts)
        if ready_fd is not None:
            os.write(ready_fd, json.dumps(facts, default=str).encode() + b"\n")

    return announce
