"""Starts the program of one role, ``python -m prefill_service`` or ``python -m decode_service``, beside a router."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from contract.identity import Role
from router.service import RouterService
from router.settings import RouterSettings
from tests.checkpoints import make_checkpoint

_SECRET = "a secret of the tests, of 32 or more characters"
_FREE: dict[str, Any] = dict.fromkeys(("http", "grpc", "internal", "admin"), "127.0.0.1:0")


async def role_of_started(module: str, folder: Path) -> tuple[str, int]:
    """Start a worker by its module; return the role in which a router has it, and its exit code after SIGTERM."""
    secret_file = folder / "secret"
    secret_file.write_text(_SECRET)
    secret_file.chmod(0o600)
    model = make_checkpoint(folder / "model")
    router = RouterService(RouterSettings(**_FREE, secret=_SECRET))
    await router.start()
    flags = {"model": model, "secret-file": secret_file, "router": router.addresses.internal}
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--kv-cache-bytes", str(2**20)),
        *(part for name, value in flags.items() for part in (f"--{name}", str(value))),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(240):
            await router.wait_for_workers(1)
            (attached,) = router._path.registry.workers
            role = Role(attached.registration.role)
            worker.send_signal(signal.SIGTERM)
            return role, await worker.wait()
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()
        await router.stop()
