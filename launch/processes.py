"""Lists the processes that ``up`` and the library start, with their flags."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from contract.addresses import local_address
from contract.errors import SettingError
from contract.identity import Role
from launch.arguments import to_arguments
from launch.child_settings import from_file
from launch.command_settings import command_setting_names
from launch.devices import DevicePlace, num_gpus, place_workers
from launch.model import model_name
from launch.router_processes import LOOPBACK, ROUTER, RouterPorts, router_names
from launch.settings import LocalSettings, available_cores, child_environment
from launch.spec import Facts, ProcessSpec
from worker.cores import show_cores
from worker.options import WorkerOptions
from worker.settings import visible_gpus

_COMMAND = "cli.main"
"""Module of the ``kvbaton`` command, which each process runs; it is never imported here."""
_NVIDIA = Path("/dev/nvidiactl")
_GOALS = ("ttft_goal_ms", "itl_goal_ms")


def local_processes(
    settings: LocalSettings,
    model: Path,
    secret_file: Path,
    cores: Sequence[int] | None = None,
    num_devices: int | None = None,
    router_defaults: Mapping[str, Any] | None = None,
) -> list[ProcessSpec]:
    """Return the routers first, then ``prefill-0 … decode-0 … both-0 …``, all on the model in folder ``model``.

    cores: those that the workers share; None: those of this process. num_devices: the machine's GPUs; None: counted.
    router_defaults: settings of routers that nothing else gives. Raises SettingError if there are too few of either.
    """
    name = settings.served_model_name or model_name(settings.model)
    shared = {
        "model": model,
        "served_model_name": name,
        "secret_file": secret_file,
        "log_level": settings.log_level,
    }
    pools = _pools(settings)
    num_workers = sum(pools.values())
    cores = available_cores() if cores is None else cores
    num_threads = settings.num_threads or max(1, len(cores) // num_workers)
    places = worker_places(settings, num_devices)
    own_cores = iter(_cores_of_each(cores, num_threads, num_workers) if settings.pin_cores else ())
    worker_flags = {
        **shared,
        **_given_options(settings),
        "num_threads": num_threads,
        "admin": LOOPBACK,
    }
    given = {**(router_defaults or {}), **from_file(settings, Role.ROUTER)}
    if not settings.keeps_files:
        given.pop("files_dir", None)
    routers = router_names(settings)
    specs = _routers(settings, shared, given)
    # Operators of the routers are those of the workers: without this, a worker would ask for no key.
    of_all = {name: given[name] for name in ("admin_keys_file",) if name in given}
    for role, count in pools.items():
        given = of_all | from_file(settings, role) if count else {}
        flags = _without({**worker_flags, "nice": _nice(role, settings)}, given)
        for index in range(count):
            worker = f"{role.value}-{index}"
            cores_flag = _without({"cores": next(own_cores, None)}, given)
            place_flags = _place_flags(places[role][index], given)
            command = _worker_command(
                role, routers, {**flags, **cores_flag, **place_flags, "worker_id": worker}
            )
            specs.append(_spec(worker, role, routers, command, given, settings))
    return specs


def _routers(
    settings: LocalSettings, shared: Mapping[str, Any], given: Mapping[str, Any]
) -> list[ProcessSpec]:
    """Return the specs of all routers. Those that share the first one's ports are started after it.

    Raises SettingError if several routers would have one folder of files.
    """
    names = router_names(settings)
    has_files = settings.keeps_files and (settings.files_dir or given.get("files_dir"))
    if len(names) > 1 and has_files:
        raise SettingError(
            f"routers is {len(names)} and files_dir is set: each router has its own files and batches, and a client would"
            " find them at one router only; use one router, or start them one by one with a folder each",
            param="files_dir",
        )
    return [
        _spec(
            name,
            Role.ROUTER,
            (ROUTER,) if settings.shares_ports and name != ROUTER else (),
            _router_command(settings, name, shared, given),
            given,
            settings,
        )
        for name in names
    ]


def _spec(
    name: str,
    role: Role,
    needs: tuple[str, ...],
    command: Callable[[Mapping[str, Facts]], list[str]],
    given: Mapping[str, Any],
    settings: LocalSettings,
) -> ProcessSpec:
    """Return the spec of one process. given: what the settings file has for its role."""
    return ProcessSpec(
        name,
        role,
        command,
        needs=needs,
        env=_environment(role, given),
        drain_seconds=float(given.get("drain_seconds", settings.drain_seconds)),
    )


def _environment(role: Role, given: Mapping[str, Any]) -> dict[str, str]:
    """Return a process's environment; ``files_dir`` is not in it, since the router gets it as a flag."""
    return child_environment(
        given, [name for name in command_setting_names(role.value) if name != "files_dir"]
    )


def _pools(settings: LocalSettings) -> dict[Role, int]:
    return dict(zip((Role.PREFILL, Role.DECODE, Role.AGGREGATED), settings.pools, strict=True))


def worker_places(settings: LocalSettings, num_devices: int | None = None) -> dict[Role, list[DevicePlace]]:
    """Return the workers' places, by role. num_devices: the machine's GPUs; None: counted.

    Raises SettingError for lists of GPUs beside a device that is not "auto" or "cuda", or with too few GPUs.
    """
    pools = _pools(settings)
    given = settings.given_devices
    if settings.device not in ("auto", "cuda"):
        if any(given.values()):
            raise SettingError(
                f"device is {settings.device}, and GPUs of workers are listed; leave it unset", param="device"
            )
        return place_workers(pools, {}, 0, dict.fromkeys(pools, 1))
    return place_workers(
        pools,
        given,
        num_gpus(visible_gpus()) if num_devices is None else num_devices,
        {role: num_ranks(settings, role) for role in pools},
    )


def num_ranks(settings: LocalSettings, role: Role) -> int:
    """Return the number of ranks of each worker of a role."""
    given = from_file(settings, role, is_logged=False)
    return int(given.get("tensor_parallel_size", settings.tensor_parallel_size))


def _place_flags(where: DevicePlace, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags for a worker's place; a device in the settings file for its role stays."""
    placed = {} if where.device is None else _without({"device": where.device}, given)
    return {**placed, "workers_on_host": where.num_sharing}


def _nice(role: Role, settings: LocalSettings) -> int | None:
    """Return the niceness of a worker: on shared cores decoding has precedence over prompts."""
    if role is not Role.PREFILL or _may_use_gpu(settings):
        return None
    return settings.usual_prefill_nice if settings.prefill_nice is None else settings.prefill_nice


def _may_use_gpu(settings: LocalSettings) -> bool:
    return settings.device.startswith("cuda") or (settings.device == "auto" and _NVIDIA.exists())


def _cores_of_each(cores: Sequence[int], num_threads: int, num_workers: int) -> list[str]:
    if num_threads * num_workers > len(cores):
        raise SettingError(
            f"pin_cores: {num_workers} workers of {num_threads} threads need {num_threads * num_workers} cores, but only "
            f"{len(cores)} are available; lower num_threads or leave it unset",
            param="pin_cores",
        )
    starts = range(0, num_threads * num_workers, num_threads)
    return [show_cores(cores[start : start + num_threads]) for start in starts]


def _router_command(
    settings: LocalSettings, name: str, shared: Mapping[str, Any], given: Mapping[str, Any]
) -> Callable[[Mapping[str, Facts]], list[str]]:
    addresses = RouterPorts(settings, given)

    def command(known: Mapping[str, Facts]) -> list[str]:
        files_dir = settings.files_dir if settings.keeps_files else None
        known_here = command_setting_names(Role.ROUTER)
        options = {name: value for name, value in _given_options(settings).items() if name in known_here}
        goals = {name: getattr(settings, name) for name in _GOALS if name in settings.model_fields_set}
        own = {**shared, **options, **goals, "files_dir": files_dir}
        fixed = {"reuse_port": True} if settings.shares_ports else {}
        return _python(Role.ROUTER, {**_without(own, given), **addresses.of(name, known), **fixed})

    return command


def _given_options(settings: LocalSettings) -> dict[str, Any]:
    """Return the worker options that were set explicitly; the others have the same defaults in the worker."""
    return {
        name: getattr(settings, name) for name in sorted(WorkerOptions.names() & settings.model_fields_set)
    }


def _without(flags: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that the file does not override for this process."""
    return {name: value for name, value in flags.items() if name not in given}


def _worker_command(
    role: Role, routers: Sequence[str], flags: Mapping[str, Any]
) -> Callable[[Mapping[str, Facts]], list[str]]:
    def command(known: Mapping[str, Facts]) -> list[str]:
        addresses = ",".join(local_address(known[name]["internal"]) for name in routers)
        return _python(role, {**flags, "router": addresses})

    return command


def _python(role: Role, flags: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-P", "-m", _COMMAND, role.value, *to_arguments(flags)]
