"""``POST /drain`` and ``POST /undrain`` on a worker's admin port, for a hook that runs before the worker is stopped.

They are accepted from this machine only: the port has no key. Operators elsewhere use the admin API of the router.
"""

from collections.abc import Awaitable, Callable
from ipaddress import ip_address

from aiohttp import web

from contract.errors import KvbatonError
from serving.errors import http_status, openai_error
from serving.query import seconds_in
from worker.worker import Worker

_Handler = Callable[[web.Request], Awaitable[web.Response]]


class DrainAdmin:
    """Serves the drain of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def routes(self) -> list[web.RouteDef]:
        """Return all paths."""
        return [web.post("/drain", _local(self._drain)), web.post("/undrain", _local(self._undrain))]

    async def _drain(self, request: web.Request) -> web.Response:
        """Begin to drain, and wait until the worker is empty: 200, or 202 after ``wait`` seconds."""
        deadline = seconds_in(request, "deadline")
        wait = seconds_in(request, "wait") or 0.0
        self._worker.drain.begin(deadline)
        is_empty = await self._worker.drain.wait_empty(wait)
        return self._state(200 if is_empty else 202)

    async def _undrain(self, request: web.Request) -> web.Response:
        self._worker.drain.undo()
        return self._state(200)

    def _state(self, status: int) -> web.Response:
        worker = self._worker
        state = {
            "worker_id": worker.identity.worker_id,
            "state": worker.lifecycle.state.value,
            "is_empty": worker.drain.is_empty,
            "num_requests": worker.num_requests,
        }
        return web.json_response(state, status=status)


def _local(handler: _Handler) -> _Handler:
    """Return a handler that refuses other machines, and answers errors with their reason."""

    async def handle(request: web.Request) -> web.Response:
        if not _is_local(request):
            reason = "only this machine may drain a worker at this port; use the admin API of its router"
            return web.json_response({"error": {"message": reason}}, status=403)
        try:
            return await handler(request)
        except KvbatonError as error:
            return web.json_response(openai_error(error), status=http_status(error.kind))

    return handle


def _is_local(request: web.Request) -> bool:
    """Return True if the client is on this machine: its address is the one that it has called, or loopback."""
    if request.transport is None:
        return False
    client = request.transport.get_extra_info("peername")[0]
    called = request.transport.get_extra_info("sockname")[0]
    return client == called or ip_address(client).is_loopback
