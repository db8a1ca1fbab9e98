"""``POST /drain`` and ``POST /undrain`` on a worker's admin port, for a hook that runs before the worker is stopped.

The port asks for an admin key if the worker has keys, and otherwise accepts the worker's own user and root on this machine.
"""

from aiohttp import web

from serving.admin_access import AdminAccess
from serving.query import seconds_in
from worker.worker import Worker


class DrainAdmin:
    """Serves the drain of one worker on its admin port, which checks the access. access: names operators in the log."""

    def __init__(self, worker: Worker, access: AdminAccess) -> None:
        self._worker = worker
        self._access = access

    def routes(self) -> list[web.RouteDef]:
        """Return all paths."""
        return [web.post("/drain", self._drain), web.post("/undrain", self._undrain)]

    async def _drain(self, request: web.Request) -> web.Response:
        """Begin to drain, and wait until the worker is empty: 200, or 202 after ``wait`` seconds."""
        deadline = seconds_in(request, "deadline")
        wait = seconds_in(request, "wait") or 0.0
        self._worker.drain.begin(deadline, by=self._requester(request))
        is_empty = await self._worker.drain.wait_empty(wait)
        return self._state(200 if is_empty else 202)

    async def _undrain(self, request: web.Request) -> web.Response:
        self._worker.drain.undo(by=self._requester(request))
        return self._state(200)

    def _requester(self, request: web.Request) -> str:
        return f"the admin port for {self._access.requester(request)}"

    def _state(self, status: int) -> web.Response:
        worker = self._worker
        state = {
            "worker_id": worker.identity.worker_id,
            "state": worker.lifecycle.state.value,
            "is_empty": worker.drain.is_empty,
            "num_requests": worker.num_requests,
        }
        return web.json_response(state, status=status)
