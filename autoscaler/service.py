"""Scales the containers of one Compose project until a signal."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from autoscaler.configured_policy import configured_policy
from autoscaler.controller import Controller
from autoscaler.docker import DockerLauncher
from autoscaler.docker_engine import open_engine
from autoscaler.timing_model import read_timing
from contract.identity import Role
from launch.autoscaler_settings import AutoscalerCommand
from launch.router_admin import RouterAdmin, admin_session
from serving.admin import AdminServer
from serving.api_keys import ADMIN_KEYS, first_key
from serving.signals import until_stopped
from worker.loop_watch import LoopWatch
from worker.router_addresses import RouterAddresses

_SILENT_SECONDS = 60.0
"""Time without a decision after which the process is not healthy: several calls of an engine may take that long."""
_HANG_SECONDS = 30.0


async def serve(settings: AutoscalerCommand, on_ready: Callable[[str], None]) -> None:
    """Run until SIGTERM or SIGINT. Containers that are being stopped are stopped by the engine all the same.

    on_ready: receives the address of the admin pages.

    Raises SettingError for settings that cannot be used, UnavailableError if the engine does not answer at the start.
    """
    devices = dict.fromkeys((Role.PREFILL, Role.DECODE), settings.tensor_parallel_size)
    least = {Role.PREFILL: settings.prefill, Role.DECODE: settings.decode}
    policy = configured_policy(settings, least, devices)
    timing = read_timing(settings.timing)
    key = settings.admin_key or first_key(None, settings.admin_keys_file, ADMIN_KEYS)
    async with (
        until_stopped() as stopped,
        open_engine(settings.docker_socket) as engine,
        admin_session(key) as session,
    ):
        addresses = RouterAddresses([settings.router_admin])

        async def routers() -> list[RouterAdmin]:
            return [RouterAdmin(address, session) for address in sorted(await addresses.resolve())]

        launcher = DockerLauncher(engine, settings.project)
        controller = Controller(policy, timing, launcher, routers)
        admin = admin_server(settings.admin, controller)
        await admin.start()
        on_ready(admin.address)
        try:
            with LoopWatch(_HANG_SECONDS):
                await _until(stopped, controller, settings.scaling_interval_seconds)
        finally:
            await admin.stop()


async def _until(stopped: asyncio.Event, controller: Controller, interval: float) -> None:
    """Run the controller until the event is set. Raises the error that ends the controller before."""
    running = asyncio.create_task(controller.run(interval), name="autoscaler")
    waiting = asyncio.create_task(stopped.wait(), name="stop signal")
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
    finally:
        running.cancel()
        waiting.cancel()
        await asyncio.wait({running, waiting})


def admin_server(address: str, controller: Controller) -> AdminServer:
    """Return the pages about a controller: healthy while it decides."""

    def missing() -> str | None:
        last = controller.last
        if last is None:
            return "there was no decision yet: routers or engine do not answer"
        seconds = time.monotonic() - last.time
        return f"the last decision was {seconds:.0f} s ago" if seconds > _SILENT_SECONDS else None

    async def state() -> dict[str, Any]:
        return {"decision": controller.last and controller.last.as_dict()}

    return AdminServer(address, missing=missing, state=state)
