"""Starts the ranks of a data-parallel group on this machine: each is a worker process, and they live and end together.

To a supervisor, the group is one process, which is ready when all ranks are, and whose drain is that of all. Ranks on
several machines are started one by one, each with its ``--data-parallel-rank`` and the address of rank 0.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from contract.addresses import join_address, split_address
from contract.identity import Role, new_boot_id
from launch.command_settings import NEVER_IN_A_FILE
from launch.kept_process import Facts, ProcessSpec
from launch.local_cluster import supervise
from launch.processes import role_command
from launch.service_settings import WorkerCommand
from launch.supervisor import Supervisor
from serving.settings_file import is_secret
from serving.signals import until_stopped

_OF_RANK = frozenset(
    {"worker_id", "device", "port", "admin", "num_threads", "data_parallel_rank", "data_parallel_address"}
)


async def serve_group(
    role: Role, settings: WorkerCommand, on_ready: Callable[[dict[str, Any]], None]
) -> None:
    """Run all ranks of a group until SIGTERM or SIGINT, and drain them then; ``on_ready`` gets the facts of the first one.

    Raises UnavailableError if a rank ends before it was ready.
    """
    specs = group_specs(role, settings)

    async def announce(facts: dict[str, Facts], stopped: asyncio.Event) -> None:
        on_ready({**facts[specs[0].name], "pid": os.getpid()})
        await stopped.wait()

    async with until_stopped() as stopped:
        await supervise(Supervisor(specs), stopped, announce)


def group_specs(role: Role, settings: WorkerCommand) -> list[ProcessSpec]:
    """Return the ranks of a group, by rank, named after its worker id.

    Threads are divided among the ranks; each has the next GPUs, and of ports that are not free ones the next one.
    """
    name = settings.worker_id or f"{role.value}-{new_boot_id()[:6]}"
    host = settings.advertise_host or settings.host
    address = settings.data_parallel_address
    if address is None:
        # The port is free from now on, for the first start of the ranks and those to come.
        with socket.create_server((settings.host, 0)) as server:
            address = join_address(host, server.getsockname()[1])
    admin_host, admin_port = split_address(settings.admin)
    own = type(settings).model_fields.keys() - _OF_RANK - (NEVER_IN_A_FILE - {"config"})
    shared = {
        field: value
        for field, value in settings.model_dump(mode="json").items()
        if field in own & settings.model_fields_set and not is_secret(field)
    }
    size = settings.data_parallel_size
    kind, _, first = settings.device.partition(":")

    def command(rank: int, _: Mapping[str, Facts]) -> list[str]:
        device = kind
        if kind == "cuda":  # the GPUs from the setting's on, as many for each rank as it has processes
            device = f"cuda:{int(first or 0) + rank * settings.tensor_parallel_size}"
        flags = {
            **shared,
            "worker_id": f"{name}-{rank}",
            "device": device,
            "port": settings.port + rank if settings.port else 0,
            "admin": join_address(admin_host, admin_port + rank if admin_port else 0),
            "num_threads": max(1, settings.num_threads // size),
            # On CUDA each rank has GPUs of its own; elsewhere the ranks share what one worker would have.
            "workers_on_host": settings.workers_on_host * (1 if kind == "cuda" else size),
            "data_parallel_rank": rank,
            "data_parallel_address": address,
        }
        return role_command(role, flags)

    return [
        ProcessSpec(f"{name}-{rank}", role, partial(command, rank), drain_seconds=settings.drain_seconds)
        for rank in range(size)
    ]
