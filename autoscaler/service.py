"""Scales the containers of one Compose project until a signal."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from autoscaler.configured_policy import configured_policy
from autoscaler.default_timing import default_timing
from autoscaler.docker import DockerLauncher
from autoscaler.docker_engine import open_engine
from autoscaler.lease import Lease, new_holder
from autoscaler.running import Autoscaler, lease_seconds
from autoscaler.timing_model import read_timing
from contract.identity import Role
from launch.autoscaler_settings import AutoscalerCommand
from launch.router_admin import RouterAdmin, admin_session
from serving.admin import AdminServer
from serving.api_keys import ADMIN_KEYS, first_key
from serving.http_hosts import listed_hosts
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
    timing = (
        read_timing(settings.timing)
        if settings.timing
        else default_timing(settings.weight_bytes, has_gpu=settings.has_gpu)
    )
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
        interval = settings.scaling_interval_seconds
        lease = Lease(new_holder("kvbaton autoscaler"), routers, lease_seconds(interval))
        autoscaler = Autoscaler(policy, timing, launcher, routers, lease)
        admin = admin_server(settings.admin, autoscaler, listed_hosts(settings.allowed_hosts))
        await admin.start()
        on_ready(admin.address)
        try:
            with LoopWatch(_HANG_SECONDS):
                await _until(stopped, autoscaler, interval)
        finally:
            await admin.stop()


async def _until(stopped: asyncio.Event, autoscaler: Autoscaler, interval: float) -> None:
    """Let the autoscaler decide until the event is set, and give its lease back then."""
    running = asyncio.create_task(autoscaler.run(interval), name="autoscaler")
    try:
        await stopped.wait()
    finally:
        running.cancel()
        await asyncio.wait({running})
    await autoscaler.lease.release()


def admin_server(address: str, autoscaler: Autoscaler, allowed_hosts: tuple[str, ...] = ()) -> AdminServer:
    """Return the pages about an autoscaler: healthy while it decides."""

    def missing() -> str | None:
        if (other := autoscaler.lease.other) is not None:
            return f"another autoscaler scales this service: {other}"
        last = autoscaler.last
        if last is None:
            return "there was no decision yet: routers or engine do not answer"
        seconds = time.monotonic() - last.time
        return f"the last decision was {seconds:.0f} s ago" if seconds > _SILENT_SECONDS else None

    async def state() -> dict[str, Any]:
        last = autoscaler.last
        return {"decision": last and last.as_dict(), "restarts": autoscaler.num_restarts}

    return AdminServer(address, missing=missing, state=state, allowed_hosts=allowed_hosts)
