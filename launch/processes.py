"""Lists the processes that ``up`` and the library start, with their flags.

There is one router, or several that share the ports for clients or have ports of their own (``RouterPorts``).
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.addresses import join_address, local_address, split_address
from contract.errors import SettingError
from contract.identity import Role
from launch.arguments import to_arguments
from launch.command_settings import command_setting_names, from_file
from launch.devices import DevicePlace, RankCounts, num_gpus, place_workers
from launch.kept_process import Facts, ProcessSpec
from launch.model import model_name
from launch.settings import LocalSettings, available_cores, child_environment
from worker.cores import show_cores
from worker.options import WorkerOptions
from worker.settings import visible_gpus

ROUTER = "router"
"""The name of the first router; the others are router-1, router-2, ..."""
LOOPBACK = "127.0.0.1:0"
_FOR_CLIENTS = ("http", "grpc")
_ADDRESSES = (*_FOR_CLIENTS, "internal", "admin")
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
    # The folder may be that of a running service, and one process alone may write it.
    if not settings.keeps_files:
        given.pop("files_dir", None)
    routers = router_names(settings)
    specs = _routers(settings, shared, given)
    may_use_gpu = settings.device.startswith("cuda") or (settings.device == "auto" and _NVIDIA.exists())
    # Operators of the routers are those of the workers: without this, a worker would ask for no key.
    of_all = {name: given[name] for name in ("admin_keys_file",) if name in given}
    for role, count in pools.items():
        given = of_all | from_file(settings, role) if count else {}
        nice = None
        if role is Role.PREFILL and not may_use_gpu:  # on shared cores decoding has precedence over prompts
            nice = settings.usual_prefill_nice if settings.prefill_nice is None else settings.prefill_nice
        flags = _without({**worker_flags, "nice": nice}, given)
        for index in range(count):
            worker = f"{role.value}-{index}"
            place = places[role][index]
            own: dict[str, Any] = {"cores": next(own_cores, None)}
            if place.device is not None:  # else all workers have the device that was set, among their flags
                own["device"] = place.device
            fixed = {"workers_on_host": place.num_sharing, "worker_id": worker}
            command = _worker_command(role, routers, {**flags, **_without(own, given), **fixed})
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
    # Without files_dir: the router gets it as a flag, or must not have it (``keeps_files``).
    names = [each for each in command_setting_names(role.value) if each != "files_dir"]
    return ProcessSpec(
        name,
        role,
        command,
        needs=needs,
        env=child_environment(given, names),
        drain_seconds=float(given.get("drain_seconds", settings.drain_seconds)),
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
        return place_workers(pools, {}, 0, dict.fromkeys(pools, RankCounts()))
    return place_workers(
        pools,
        given,
        num_gpus(visible_gpus()) if num_devices is None else num_devices,
        {role: rank_counts(settings, role) for role in pools},
    )


def rank_counts(settings: LocalSettings, role: Role) -> RankCounts:
    """Return the ranks of each worker of a role. A data-parallel group, which is one process here, counts as one worker."""
    given = from_file(settings, role, is_logged=False)
    return RankCounts(
        data=int(given.get("data_parallel_size", settings.data_parallel_size)),
        tensor=int(given.get("tensor_parallel_size", settings.tensor_parallel_size)),
    )


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
        # A setting that both have, as drain_seconds, is given to both.
        options = {name: value for name, value in _given_options(settings).items() if name in known_here}
        goals = {name: getattr(settings, name) for name in _GOALS if name in settings.model_fields_set}
        own = {**shared, **options, **goals, "files_dir": files_dir}
        fixed = {"reuse_port": True} if settings.shares_ports else {}
        return role_command(Role.ROUTER, {**_without(own, given), **addresses.of(name, known), **fixed})

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
    # The routers' ports are free ones, which are known only when a worker is started.
    def command(known: Mapping[str, Facts]) -> list[str]:
        addresses = ",".join(local_address(known[name]["internal"]) for name in routers)
        return role_command(role, {**flags, "router": addresses})

    return command


def role_command(role: Role, flags: Mapping[str, Any]) -> list[str]:
    """Return the command that runs one process of a role, with these settings as flags."""
    return [sys.executable, "-P", "-m", _COMMAND, role.value, *to_arguments(flags)]


def router_names(settings: LocalSettings) -> tuple[str, ...]:
    """Return the names of all routers, the first one first."""
    return (ROUTER, *(f"{ROUTER}-{number}" for number in range(1, settings.num_routers)))


@dataclass(frozen=True)
class RouterPorts:
    """Decides the addresses of each router. given: addresses that the settings file has for routers."""

    settings: LocalSettings
    given: Mapping[str, Any]

    def of(self, name: str, known: Mapping[str, Facts]) -> dict[str, str]:
        """Return the flags for a router's addresses. One that was ready before keeps its own.

        Routers with ports of their own count up from the first one's; a port 0 stays 0. The ports for clients may be shared:
        the first router chooses them then.
        """
        if name in known:  # workers and clients have these addresses already
            return {kind: known[name][kind] for kind in _ADDRESSES}
        own = {
            "http": self.settings.http,
            "grpc": self.settings.grpc,
            "internal": LOOPBACK,
            "admin": LOOPBACK,
        }
        if name == ROUTER:
            return {kind: address for kind, address in own.items() if kind not in self.given}
        number = int(name.removeprefix(f"{ROUTER}-"))
        found = {}
        for kind, address in own.items():
            host, port = split_address(self.given.get(kind, address))
            found[kind] = join_address(host, port + number if port else 0)
        if self.settings.shares_ports:
            found |= {kind: known[ROUTER][kind] for kind in _FOR_CLIENTS}
        return found
