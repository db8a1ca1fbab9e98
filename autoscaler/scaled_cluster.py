"""Runs routers and workers on this machine until a signal, and scales the pools."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from autoscaler.configured_policy import configured_policy
from autoscaler.default_timing import default_timing
from autoscaler.lease import Lease, new_holder
from autoscaler.local import LocalLauncher
from autoscaler.policy import ScalingPolicy
from autoscaler.running import Autoscaler, lease_seconds
from autoscaler.signals import POOLS
from autoscaler.timing_model import TimingModel, read_timing
from contract.addresses import local_address
from contract.identity import Role
from launch.child_settings import from_file
from launch.devices import num_gpus
from launch.local_cluster import WhenReady, cluster_secret, run_until_signal, supervise
from launch.machine_settings import UpSettings
from launch.memory_plan import check_memory, weight_bytes
from launch.model import check_model, find_model
from launch.processes import local_processes, num_ranks
from launch.router_admin import RouterAdmin, admin_session
from launch.router_processes import router_names
from launch.scaling_settings import WAKE_SECONDS
from launch.settings import child_environment, variable
from launch.spec import Facts, ProcessSpec
from launch.supervisor import Supervisor
from serving.api_keys import first_key
from worker.settings import visible_gpus

logger = logging.getLogger(__name__)


def policy_of(settings: UpSettings) -> ScalingPolicy:
    """Return the policy of ``up --autoscale``. Raises SettingError if the settings contradict each other."""
    num_prefill, num_decode, _ = settings.pools
    least = {Role.PREFILL: num_prefill, Role.DECODE: num_decode}
    return configured_policy(settings, least, {role: num_ranks(settings, role) for role in least})


def timing_of(settings: UpSettings, model: Path) -> TimingModel:
    """Return the times of the timing file, or a guess for the model in a folder. Raises SettingError for the file."""
    if settings.timing is not None:
        return read_timing(settings.timing)
    has_gpu = settings.device.startswith("cuda") or (
        settings.device == "auto" and num_gpus(visible_gpus()) > 0
    )
    return default_timing(weight_bytes(model), has_gpu=has_gpu)


def run_scaled(settings: UpSettings, when_ready: WhenReady) -> None:
    """Start the least workers and scale the pools, as ``launch.local_cluster.run_local`` does without scaling.

    Nothing is measured before ``when_ready``: without a timing file the law begins with a guess, which the readings of what
    is served replace.
    """
    policy = policy_of(settings)
    model = find_model(settings.model)
    timing = timing_of(settings, model)

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
    """Run the processes and the autoscaler. specs: those of the largest pools.

    A pool that may be empty begins with one worker too: if workers cannot start, that is known at once.
    """
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
        if settings.may_be_empty:
            _warn_of_short_wait(specs[0], start_seconds)
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
            autoscaler = Autoscaler(policy, timing, launcher, routers, lease, start_seconds=start_seconds)
            scaling = asyncio.create_task(autoscaler.run(interval), name="autoscaler")
            try:
                await when_ready(facts, until)
            finally:
                scaling.cancel()
                await asyncio.wait({scaling})

    await supervise(supervisor, stopped, use)


def _warn_of_short_wait(router: ProcessSpec, start_seconds: float) -> None:
    """Log if requests wait for an empty pool for less than a worker's start takes."""
    wait = float((router.env or {}).get(variable("worker_wait_seconds"), WAKE_SECONDS))
    if wait <= start_seconds:
        logger.warning(
            "worker_wait_seconds is %g, and the workers took %.0f s to start: the first requests after an idle time fail",
            wait,
            start_seconds,
        )


def _admin_key(settings: UpSettings) -> str | None:
    """Return an admin key of the routers, if they have keys."""
    given = child_environment(from_file(settings, Role.ROUTER, is_logged=False))
    environment = {name.upper(): value for name, value in given.items()}
    file = environment.get(variable("admin_keys_file"))
    return first_key(environment.get(variable("admin_keys")), Path(file) if file else None)
