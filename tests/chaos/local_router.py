"""A router in this process, whose workers run in processes of their own: what the router does can be timed exactly."""

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from router.service import RouterService
from router.settings import RouterSettings
from tests.chaos.fleet import Fleet, role_of
from tests.private_files import write_private

_SECRET = "a secret of the benchmarks, of 32 or more characters"


@asynccontextmanager
async def running_workers(
    folder: Path, names: Sequence[str], **flags: Any
) -> AsyncIterator[tuple[RouterService, Fleet]]:
    """Run the router, and a worker for each name with these flags, in float32. A name begins with the worker's role."""
    fleet = Fleet(folder)
    write_private(fleet.secret_file, _SECRET)
    addresses: dict[str, Any] = dict.fromkeys(("http", "grpc", "internal", "admin"), "127.0.0.1:0")
    async with AsyncExitStack() as stack:
        router = RouterService(RouterSettings(**addresses, secret=_SECRET))
        await router.start()
        stack.push_async_callback(router.stop)
        stack.push_async_callback(fleet.stop_all)
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                start = fleet.start_worker(
                    name,
                    role_of(name),
                    routers=(),
                    router=router.addresses.internal,
                    kv_cache_bytes=128 * 2**20,
                    **flags,
                )
                tasks.create_task(start)
        gc.collect()
        gc.freeze()  # as a router's process does: a full collection would look like a pause of every stream
        yield router, fleet
