"""Runs routers and workers on this machine until a signal, and scales the pools."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from autoscaler.launchers.local import LocalLauncher
from autoscaler.policy import ScalingPolicy
from autoscaler.running import Autoscaler, Lease, configured_policy, lease_seconds, new_holder
from autoscaler.signals import POOLS
from autoscaler.timing_model import TimingModel, default_timing, read_timing
from contract.addresses import local_address
from contract.identity import Role
from launch.command_settings import from_file
from launch.devices import num_gpus
from launch.kept_process import Facts, ProcessSpec
from launch.local_cluster import WhenReady, cluster_secret, run_until_signal, supervise
from launch.machine_settings import WAKE_SECONDS, UpSettings
from launch.memory_plan import check_memory, weight_bytes
from launch.model import check_model, find_model
from launch.processes import local_processes, rank_counts, router_names
from launch.router_admin import RouterAdmin, admin_session
from launch.settings import child_environment, variable
from launch.supervisor import Supervisor
from serving.api_keys import first_key
from worker.settings import visible_gpus

logger = logging.getLogger(__name__)


def policy_of(settings: UpSettings) -> ScalingPolicy:
    """Return the policy of ``up --autoscale``. Raises SettingError if the settings contradict each other."""
    num_prefill, num_decode, _ = settings.pools
    least = {Role.PREFILL: num_prefill, Role.DECODE: num_decode}
    return configured_policy(settings, least, {role: rank_counts(settings, role) for role in least})


def run_scaled(settings: UpSettings, when_ready: WhenReady) -> None:
    """Start the least workers and scale the pools, as ``launch.local_cluster.run_local`` does without scaling.

    Nothing is measured before ``when_ready``: without a timing file the law begins with a guess, which the readings of what
    is served replace.
    """
    policy = policy_of(settings)
    model = find_model(settings.model)
    is_auto_gpu = settings.device == "auto" and num_gpus(visible_gpus()) > 0
    has_gpu = settings.device.startswith("cuda") or is_auto_gpu
    timing = (
        read_timing(settings.timing)
        if settings.timing is not None
        else default_timing(weight_bytes(model), has_gpu=has_gpu)
    )

    async def serve(stopped: asyncio.Event, use: WhenReady) -> None:
        largest = settings.with_largest_pools()
        await asyncio.to_thread(check_model, settings, model)
        await asyncio.to_thread(check_memory, largest, model)
        with cluster_secret(settings.secret_file) as secret_file:
            specs = local_processes(largest, model, secret_file, router_defaults=settings.router_defaults)
            await _serve(settings, specs, policy, timing, stopped, use)

    asyncio.run(run_until_signal(serve, when_ready))


async def _serve(
    settings: UpSettings,
    specs: Sequence[ProcessSpec],
    policy: ScalingPolicy,
    timing: TimingModel,
    stopped: asyncio.Event,
    when_ready: WhenReady,
) -> None:
    """Run the processes and the autoscaler. specs: those of the largest pools."""
    # A pool that may be empty begins with one worker too: if workers cannot start, that is known at once.
    least = {role: max(1, policy.bounds(role).least) for role in POOLS}
    initial = [
        spec
        for spec in specs
        if spec.role not in least or int(spec.name.rpartition("-")[2]) < least[spec.role]
    ]
    supervisor = Supervisor(initial, ready_file=settings.ready_file)
    workers = [spec for spec in specs if spec.role in least]
    launcher = LocalLauncher(supervisor, workers, [spec.name for spec in initial if spec.role in least])

    begin = time.monotonic()

    async def use(facts: dict[str, Facts], until: asyncio.Event) -> None:
        start_seconds = time.monotonic() - begin
        # The first spec is a router's: a request for an empty pool waits there for a worker's start.
        wait = float((specs[0].env or {}).get(variable("worker_wait_seconds"), WAKE_SECONDS))
        if settings.may_be_empty and wait <= start_seconds:
            logger.warning(
                "worker_wait_seconds is %g, and the workers took %.0f s to start: the first requests after an idle time"
                " fail",
                wait,
                start_seconds,
            )
        async with admin_session(_admin_key(settings)) as session:

            async def routers() -> list[RouterAdmin]:
                known = supervisor.facts
                return [
                    RouterAdmin(local_address(known[name]["admin"]), session)
                    for name in router_names(settings)
                    if name in known
                ]

            interval = settings.scaling_interval_seconds
            lease = Lease(new_holder("kvbaton up"), routers, lease_seconds(interval))
            # The time of the first starts is known here, so the forecast looks as far ahead from the first decision on.
            autoscaler = Autoscaler(policy, timing, launcher, routers, lease, start_seconds=start_seconds)
            scaling = asyncio.create_task(autoscaler.run(interval), name="autoscaler")
            try:
                await when_ready(facts, until)
            finally:
                scaling.cancel()
                await asyncio.wait({scaling})

    await supervise(supervisor, stopped, use)


def _admin_key(settings: UpSettings) -> str | None:
    """Return an admin key of the routers, if they have keys."""
    given = child_environment(from_file(settings, Role.ROUTER, is_logged=False))
    environment = {name.upper(): value for name, value in given.items()}
    file = environment.get(variable("admin_keys_file"))
    return first_key(environment.get(variable("admin_keys")), Path(file) if file else None)
