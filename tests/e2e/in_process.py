"""A router and whole workers in this process: real engines, real gRPC, real transports between them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.identity import Role, new_boot_id
from engine.client import InProcessClient
from engine.connecting import Transfers
from kv_transfer.connector import TransferFactory
from kv_transfer.options import TransportName
from roles.table import ROLES, STAGES
from router.service import RouterService
from router.settings import RouterSettings
from worker.registration import WorkerIdentity
from worker.service import open_ports
from worker.settings import WorkerSettings
from worker.worker import Worker

_SECRET = "a secret of the tests, of 32 or more characters"


@dataclass
class LocalWorker:
    """One worker and the task that keeps it connected to its router."""

    worker: Worker
    run: asyncio.Task[None]

    def die(self) -> None:
        """Stop without deregistration, so that the router must detect it."""
        self.run.cancel()


@dataclass
class LocalService:
    """The router, its public HTTP address, and its workers."""

    router: RouterService
    http: str
    workers: list[LocalWorker]

    def busiest_decoder(self) -> LocalWorker:
        """Return the decode worker with the most requests."""
        decoders = [one for one in self.workers if one.worker.identity.role is not Role.PREFILL]
        return max(decoders, key=lambda one: one.worker.num_requests)


@asynccontextmanager
async def running_in_process(
    folder: Path,
    model: Path,
    roles: list[Role],
    transport: TransportName | dict[Role, TransportName],
    router_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[LocalService]:
    """Run a router with a worker for each of ``roles``, in float32, with further settings of both.

    transport: of all workers, or by role.
    """
    secret_file = folder / "secret"
    secret_file.write_text(_SECRET)
    secret_file.chmod(0o600)
    free: dict[str, Any] = dict.fromkeys(("http", "grpc", "internal", "admin"), "127.0.0.1:0")
    async with AsyncExitStack() as stack:
        router = RouterService(RouterSettings(**free, secret=_SECRET, **(router_options or {})))
        await router.start()
        stack.push_async_callback(router.stop)
        workers = []
        for index, role in enumerate(roles):
            options = WorkerSettings(
                model=model,
                router=router.addresses.internal,
                secret_file=secret_file,
                worker_id=f"{role.value}-{index}",
                dtype="float32",
                transport=transport if isinstance(transport, str) else transport[role],
                kv_cache_bytes=16 * 2**20,
                peer_timeout_seconds=20.0,
                **settings,
            )
            workers.append(await _start_worker(stack, role, options))
        async with asyncio.timeout(20):
            await router.wait_ready()
        yield LocalService(router, router.addresses.http, workers)


async def _start_worker(stack: AsyncExitStack, role: Role, settings: WorkerSettings) -> LocalWorker:
    identity = WorkerIdentity(role, str(settings.worker_id), new_boot_id())
    transfer = settings.transfer(role, identity.worker_id, identity.boot_id)
    engine = await InProcessClient.start(
        settings.engine_settings(), Transfers(TransferFactory(transfer), STAGES)
    )
    stack.push_async_callback(engine.shutdown)
    worker = Worker(identity, ROLES, settings, engine)
    addresses = await stack.enter_async_context(open_ports(worker, settings))
    run = asyncio.create_task(worker.run(addresses["grpc"], addresses["admin"]))
    stack.push_async_callback(asyncio.wait, [run])
    stack.callback(run.cancel)
    await worker.wait_ready()
    return LocalWorker(worker, run)
