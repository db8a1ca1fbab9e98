"""Starts a prefill worker."""

from contract.identity import Role
from worker.service import OnReady, serve_worker
from worker.settings import WorkerSettings


async def serve(settings: WorkerSettings, on_ready: OnReady) -> None:
    """Run until SIGTERM or SIGINT; ``on_ready`` gets the addresses once a router is attached."""
    await serve_worker(Role.PREFILL, settings, on_ready)
