"""Scales the workers that a launcher starts, for routers elsewhere, until a signal: ``kvbaton autoscaler``."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from autoscaler.launchers.registry import open_launcher
from autoscaler.running import Autoscaler, Lease, configured_policy, lease_seconds, new_holder
from autoscaler.timing_model import default_timing, read_timing
from contract.identity import Role
from launch.arguments import parse
from launch.devices import RankCounts
from launch.router_admin import RouterAdmin, admin_session
from launch.service_settings import AutoscalerCommand
from serving import event_loop
from serving.admin import AdminServer
from serving.api_keys import ADMIN_KEYS, first_key
from serving.http_hosts import listed_hosts
from serving.logs import configure_logs, log_settings
from serving.signals import until_stopped
from worker.loop_watch import LoopWatch
from worker.router_addresses import RouterAddresses

logger = logging.getLogger(__name__)

_SILENT_SECONDS = 60.0
"""Time without a decision after which the process is not healthy: several calls of an engine may take that long."""
_HANG_SECONDS = 30.0


def autoscaler(arguments: Sequence[str]) -> None:
    """Run ``kvbaton autoscaler``."""
    settings = parse(AutoscalerCommand, "kvbaton autoscaler", arguments)
    configure_logs("autoscaler", settings.log_level)
    log_settings(logger, settings)
    event_loop.run(serve(settings, lambda address: logger.info("ready: /health at %s", address)))


async def serve(settings: AutoscalerCommand, on_ready: Callable[[str], None]) -> None:
    """Run until SIGTERM or SIGINT. Workers that are being removed end all the same: a launcher has ordered that already.

    on_ready: receives the address of the admin pages.

    Raises SettingError for settings that cannot be used, UnavailableError if the engine does not answer at the start.
    """
    ranks = RankCounts(data=settings.data_parallel_size, tensor=settings.tensor_parallel_size)
    least = {Role.PREFILL: settings.prefill, Role.DECODE: settings.decode}
    policy = configured_policy(settings, least, dict.fromkeys(least, ranks))
    timing = (
        read_timing(settings.timing)
        if settings.timing
        else default_timing(settings.weight_bytes, has_gpu=settings.has_gpu)
    )
    key = settings.admin_key or first_key(None, settings.admin_keys_file, ADMIN_KEYS)
    async with (
        until_stopped() as stopped,
        open_launcher(settings.launcher, settings) as launcher,
        admin_session(key) as session,
    ):
        addresses = RouterAddresses([settings.router_admin])

        async def routers() -> list[RouterAdmin]:
            return [RouterAdmin(address, session) for address in sorted(await addresses.resolve())]

        interval = settings.scaling_interval_seconds
        lease = Lease(new_holder("kvbaton autoscaler"), routers, lease_seconds(interval))
        scaler = Autoscaler(policy, timing, launcher, routers, lease)
        admin = _admin_server(settings.admin, scaler, listed_hosts(settings.allowed_hosts))
        await admin.start()
        on_ready(admin.address)
        try:
            with LoopWatch(_HANG_SECONDS):
                running = asyncio.create_task(scaler.run(interval), name="autoscaler")
                try:
                    await stopped.wait()
                finally:
                    running.cancel()
                    await asyncio.wait({running})
                await lease.release()  # only now, when this autoscaler orders nothing any more
        finally:
            await admin.stop()


def _admin_server(address: str, scaler: Autoscaler, allowed_hosts: tuple[str, ...]) -> AdminServer:
    """Return the pages about an autoscaler: healthy while it decides."""

    def missing() -> str | None:
        if (other := scaler.lease.other) is not None:
            return f"another autoscaler scales this service: {other}"
        last = scaler.last
        if last is None:
            return "there was no decision yet: routers or engine do not answer"
        seconds = time.monotonic() - last.time
        return f"the last decision was {seconds:.0f} s ago" if seconds > _SILENT_SECONDS else None

    async def state() -> dict[str, Any]:
        last = scaler.last
        return {"decision": last and last.as_dict(), "restarts": scaler.num_restarts}

    return AdminServer(address, missing=missing, state=state, allowed_hosts=allowed_hosts)
