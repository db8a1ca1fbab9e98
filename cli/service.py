"""The commands that run one router or one worker, for clusters and containers.

What takes long to import (the router, the engine) is imported when the settings have been read: bad arguments and --help
need an answer at once.
"""

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from contract.errors import KvbatonError
from contract.identity import Role
from contract.processes import die_with_parent
from launch.arguments import parse
from launch.service_settings import (
    BothCommand,
    DecodeCommand,
    PrefillCommand,
    RouterCommand,
    WorkerCommand,
)
from launch.settings import ServiceSettings
from serving import event_loop
from serving.http_acceptor import raise_descriptor_limit
from serving.logs import configure_logs, log_settings
from worker.loop_watch import LoopWatch

logger = logging.getLogger(__name__)

HANG_SECONDS = 30.0
"""Time after which an event loop that does nothing counts as hung."""
OnReady = Callable[[dict[str, Any]], None]
C = TypeVar("C", bound=ServiceSettings)


def router(arguments: Sequence[str]) -> None:
    """Run ``kvbaton router``."""
    settings = enter_service(RouterCommand, Role.ROUTER, arguments)
    log_settings(logger, settings)
    from router.service import serve

    run_service(
        settings,
        lambda settings, ready: end_if_hung(serve(settings, lambda addresses: ready(addresses.as_dict()))),
    )


def prefill(arguments: Sequence[str]) -> None:
    """Run ``kvbaton prefill``."""
    _run_worker(PrefillCommand, Role.PREFILL, arguments)


def decode(arguments: Sequence[str]) -> None:
    """Run ``kvbaton decode``."""
    _run_worker(DecodeCommand, Role.DECODE, arguments)


def both(arguments: Sequence[str]) -> None:
    """Run ``kvbaton both``."""
    _run_worker(BothCommand, Role.AGGREGATED, arguments)


def _run_worker(command: type[WorkerCommand], role: Role, arguments: Sequence[str]) -> None:
    settings = enter_service(command, role, arguments)
    if settings.data_parallel_size > 1 and settings.data_parallel_rank is None:
        from launch.group import serve_group

        run_service(settings, partial(serve_group, role), asyncio.run)  # uvloop cannot make process groups
        return
    from roles.table import ROLES, STAGES
    from worker.service import serve_worker

    run_service(settings, partial(serve_worker, role, ROLES, STAGES))


def enter_service(command: type[C], role: Role, arguments: Sequence[str]) -> C:
    """Read the settings, make the process end with its parent, configure its logs, raise its limit of open files."""
    settings = parse(command, f"kvbaton {role.value}", arguments)
    if settings.parent_pid is not None:  # before anything else: the parent may have died already
        die_with_parent(settings.parent_pid)
    configure_logs(getattr(settings, "worker_id", None) or role.value, settings.log_level)
    raise_descriptor_limit()
    return settings


def run_service(
    settings: C,
    serve: Callable[[C, OnReady], Awaitable[None]],
    run_loop: Callable[[Coroutine[Any, Any, None]], None] = event_loop.run,
) -> None:
    """Run a service's entry point until it ends. A supervisor that waits for it gets the error of its start."""
    ready_fd = settings.ready_fd
    if ready_fd is not None:
        # A process that the service starts would keep the pipe open, and the supervisor would not see the service end.
        os.set_inheritable(ready_fd, False)

    def announce(facts: dict[str, Any]) -> None:
        event_loop.freeze_objects()  # when everything is imported: later collections need not look at it again
        logger.info("ready: %s", facts)
        if ready_fd is not None:
            os.write(ready_fd, json.dumps(facts, default=str).encode() + b"\n")

    async def run() -> None:
        await serve(settings, announce)

    try:
        run_loop(run())
    except KvbatonError as error:
        if ready_fd is not None:
            with suppress(OSError):  # the supervisor waits no longer
                os.write(ready_fd, json.dumps({"error": error.message}).encode() + b"\n")
        raise


async def end_if_hung(work: Awaitable[None], patience_seconds: float = HANG_SECONDS) -> None:
    """Await ``work``, and end the process if its event loop hangs: its ports would accept connections and never answer."""
    with LoopWatch(patience_seconds):
        await work
