"""Runs routers and workers on this machine until a signal, and scales the pools."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from autoscaler.configured_policy import configured_policy
from autoscaler.controller import Controller
from autoscaler.local import LocalLauncher
from autoscaler.policy import ScalingPolicy
from autoscaler.timing_model import TimingModel, read_timing
from contract.errors import SettingError
from contract.identity import Role
from launch.child_settings import from_file
from launch.local_cluster import WhenReady, cluster_secret, supervise
from launch.machine_settings import UpSettings
from launch.memory_plan import check_memory
from launch.model import find_model
from launch.processes import local_processes, num_ranks
from launch.router_admin import RouterAdmin, admin_session
from launch.router_processes import router_names
from launch.settings import child_environment, variable
from launch.spec import Facts
from launch.supervisor import Supervisor
from serving.api_keys import first_key
from serving.signals import until_stopped

logger = logging.getLogger(__name__)


def policy_of(settings: UpSettings) -> ScalingPolicy:
    """Return the policy of ``up --autoscale``. Raises SettingError if the settings contradict each other."""
    num_prefill, num_decode, _ = settings.pools
    least = {Role.PREFILL: num_prefill, Role.DECODE: num_decode}
    return configured_policy(settings, least, {role: num_ranks(settings, role) for role in least})


Measure = Callable[[Facts, RouterAdmin, float], Awaitable[TimingModel]]
"""(a router's facts, its admin port, seconds of a worker's start) → the times of the service, which it measures."""


async def _refuse(_router: Facts, _admin: RouterAdmin, _start_seconds: float) -> TimingModel:
    raise SettingError("timing is not set: `kvbaton bench --profile` writes a timing file", param="timing")


async def run_scaled(settings: UpSettings, when_ready: WhenReady, measure: Measure = _refuse) -> None:
    """Start the least workers and scale the pools, as ``launch.local_cluster.run_local`` does without scaling.

    measure: called before ``when_ready``, unless there is a timing file.
    """
    policy = policy_of(settings)
    timing = None if settings.timing is None else read_timing(settings.timing)
    model = await asyncio.to_thread(find_model, settings.model)
    begin = time.monotonic()

    async def times(router: Facts, admin: RouterAdmin) -> TimingModel:
        return timing or await measure(router, admin, time.monotonic() - begin)

    async with until_stopped() as stopped:
        largest = settings.with_largest_pools()
        await asyncio.to_thread(check_memory, largest, model)
        with cluster_secret(settings.secret_file) as secret_file:
            await _serve(settings, largest, policy, times, model, secret_file, stopped, when_ready)


async def _serve(
    settings: UpSettings,
    largest: UpSettings,
    policy: ScalingPolicy,
    times: Callable[[Facts, RouterAdmin], Awaitable[TimingModel]],
    model: Path,
    secret_file: Path,
    stopped: asyncio.Event,
    when_ready: WhenReady,
) -> None:
    specs = local_processes(largest, model, secret_file)
    least = {Role.PREFILL: policy.prefill.least, Role.DECODE: policy.decode.least}
    initial = [
        spec
        for spec in specs
        if spec.role not in least or int(spec.name.rpartition("-")[2]) < least[spec.role]
    ]
    supervisor = Supervisor(initial, ready_file=settings.ready_file)
    workers = [spec for spec in specs if spec.role in least]
    launcher = LocalLauncher(supervisor, workers, [spec.name for spec in initial if spec.role in least])

    async def use(facts: dict[str, Facts], until: asyncio.Event) -> None:
        async with admin_session(_admin_key(settings)) as session:

            async def routers() -> list[RouterAdmin]:
                known = supervisor.facts
                return [
                    RouterAdmin(known[name]["admin"], session)
                    for name in router_names(settings)
                    if name in known
                ]

            admin, *_ = await routers()
            timing = await times(facts[router_names(settings)[0]], admin)
            controller = asyncio.create_task(
                Controller(policy, timing, launcher, routers).run(settings.scaling_interval_seconds),
                name="autoscaler",
            )
            controller.add_done_callback(_log_end)
            try:
                await when_ready(facts, until)
            finally:
                controller.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({controller})

    await supervise(supervisor, stopped, use)


def _log_end(controller: asyncio.Task[None]) -> None:
    """Log an error that has ended the controller. The service goes on with the workers that it has."""
    if not controller.cancelled() and (error := controller.exception()):
        logger.error("the autoscaler has ended; the pools stay as they are", exc_info=error)


def _admin_key(settings: UpSettings) -> str | None:
    """Return an admin key of the routers, if they have keys."""
    given = child_environment(from_file(settings, Role.ROUTER, is_logged=False))
    environment = {name.upper(): value for name, value in given.items()}
    file = environment.get(variable("admin_keys_file"))
    return first_key(environment.get(variable("admin_keys")), Path(file) if file else None)
