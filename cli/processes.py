"""Which processes ``up`` starts, and with which flags."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cli.arguments import to_arguments
from cli.model import model_name
from cli.settings import LocalSettings, available_cores, child_environment
from contract.identity import Role
from worker.launch import Facts, ProcessSpec

ROUTER = "router"
_LOOPBACK = "127.0.0.1:0"
_WORKER_FLAGS = (
    "device",
    "transport",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_bytes",
)


def local_processes(settings: LocalSettings, model: Path, secret_file: Path) -> list[ProcessSpec]:
    """The router first, then ``prefill-0 … decode-0 … both-0 …``, all on the model in folder ``model``."""
    name = settings.served_model_name or model_name(settings.model)
    shared = {
        "model": model,
        "served_model_name": name,
        "secret_file": secret_file,
        "log_level": settings.log_level,
    }
    pools = dict(zip((Role.PREFILL, Role.DECODE, Role.BOTH), settings.pools, strict=True))
    num_workers = sum(pools.values())
    worker_flags = {
        **shared,
        **{flag: getattr(settings, flag) for flag in _WORKER_FLAGS},
        "workers_on_host": num_workers,
        "num_threads": settings.num_threads or max(1, available_cores() // num_workers),
        "admin": _LOOPBACK,
    }
    env = child_environment()
    specs = [ProcessSpec(ROUTER, Role.ROUTER, _router_command(settings, shared), env=env)]
    for role, count in pools.items():
        for index in range(count):
            worker = f"{role.value}-{index}"
            command = _worker_command(role, {**worker_flags, "worker_id": worker})
            specs.append(ProcessSpec(worker, role, command, needs=(ROUTER,), env=env))
    return specs


def _router_command(
    settings: LocalSettings, shared: Mapping[str, Any]
) -> Callable[[Mapping[str, Facts]], list[str]]:
    def command(known: Mapping[str, Facts]) -> list[str]:
        asked = {"http": settings.http, "grpc": settings.grpc, "internal": _LOOPBACK, "admin": _LOOPBACK}
        earlier = known.get(ROUTER, {})
        addresses = {name: earlier.get(name, address) for name, address in asked.items()}
        return _python(Role.ROUTER, {**shared, **addresses})

    return command


def _worker_command(role: Role, flags: Mapping[str, Any]) -> Callable[[Mapping[str, Facts]], list[str]]:
    def command(known: Mapping[str, Facts]) -> list[str]:
        return _python(role, {**flags, "router": known[ROUTER]["internal"]})

    return command


def _python(role: Role, flags: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-P", "-m", "cli.main", role.value, *to_arguments(flags)]
