"""The admin API about workers: ``GET /admin/workers``."""

from importlib.metadata import version
from typing import Any

from aiohttp import web

from router.admin_access import AdminAccess
from router.request_path import RequestPath
from router.worker_facts import worker_facts


class WorkerAdmin:
    """Serves the API on a router's admin port. access: checks every request."""

    def __init__(self, path: RequestPath, access: AdminAccess) -> None:
        self._path = path
        self._access = access

    def routes(self) -> list[web.RouteDef]:
        """Return all paths."""
        return [web.get("/admin/workers", self._access.guard(self._list))]

    async def _list(self, _: web.Request) -> web.Response:
        return web.json_response(self._facts())

    def _facts(self) -> dict[str, Any]:
        path = self._path
        return {
            "version": version("kvbaton"),
            "model": path.models.card().name if path.models.is_known else None,
            "num_requests_waiting": path.tracker.num_waiting,
            "num_requests_running": path.tracker.num_running,
            "workers": [worker_facts(worker) for worker in path.registry.workers],
        }
