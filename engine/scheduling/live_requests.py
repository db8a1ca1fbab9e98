"""The requests that have not finished: how they are added, and the one way in which all of them finish."""

from contract.errors import InvalidRequestError
from contract.outputs import TokenLogprobs
from contract.requests import EngineRequest
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.remote.remote_kv import RemoteKV
from engine.scheduling.requests.finish import Finish
from engine.scheduling.requests.outbox import Outbox
from engine.scheduling.requests.queues import BatchQueues
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.request_index import RequestIndex
from engine.scheduling.waits.deadlines import Deadline, Deadlines
from engine.scheduling.waits.waits import Waits


class LiveRequests:
    """Owns every unfinished request, with its deadlines and the outputs that are to be sent.

    finished_req_ids: finished requests that the runner still keeps. has_changes: something has changed since the last step
    was decided.
    """

    def __init__(
        self,
        pool: BlockPool,
        queues: BatchQueues,
        waits: Waits,
        remote_kv: RemoteKV,
        deadlines: Deadlines,
        outbox: Outbox,
    ) -> None:
        self.by_key: dict[str, Request] = {}
        self.index = RequestIndex()
        self.finished_req_ids: set[str] = set()
        self.has_changes = False
        self.outbox = outbox
        self.deadlines = deadlines
        self._pool = pool
        self._queues = queues
        self._waits = waits
        self._remote_kv = remote_kv

    def check(self, asked: EngineRequest) -> None:
        """Raise InvalidRequestError for a key or a transfer that is in use; see also ``RemoteKV.check``."""
        is_live = any(key in self.by_key for key in asked.keys)
        is_lent = asked.key in self._remote_kv.leases
        if is_live or is_lent or self._pool.is_quarantined(asked.key):
            raise InvalidRequestError(f"request {asked.key} is here already; a replay needs a higher attempt")
        self._remote_kv.check(asked, self.index)

    def start(self, request: Request) -> None:
        """Add a new request, which waits or is queued. Raises what a wait stage raises; then it was not added."""
        if not self._waits.start(request):
            self._queues.waiting.add(request)
        self.register(request)

    def register(self, request: Request) -> None:
        """Add a request that waits or is queued already, with the deadline of its whole life."""
        self.by_key[request.key] = request
        self.index.add(request.asked, request.dismissed)
        self.deadlines.add(Deadline(request.expires, request.key, request.asked.deadline_seconds))

    def finish(
        self,
        request: Request,
        finish: Finish,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        pooled: list[float] | None = None,
    ) -> None:
        """Finish a request, whatever its status: release what it holds, and report it to its client and the runner."""
        is_released = self._waits.give_up(request) or self._remote_kv.abandon(request, finish)
        if not is_released:
            self._pool.free(request.key)
        self._queues.remove(request)
        del self.by_key[request.key]
        self.index.discard(request.key)
        self.deadlines.forget(request.key)
        if request.is_known_to_runner:
            self.finished_req_ids.add(request.key)
        self.outbox.add(request, token_ids or [], finish, logprobs, pooled)
        self.has_changes = True

    def finish_overdue(self) -> None:
        """Finish the requests whose deadline, or whose current wait's deadline, has passed."""
        for deadline in self.deadlines.take_expired():
            request = self.by_key.get(deadline.key)
            if request is None:
                continue
            if deadline.stage is None:
                self.finish(request, Finish.late(request.status, deadline.seconds))
            elif finish := self._waits.overdue(request, deadline):
                self.finish(request, finish)

    def take_finished(self) -> set[str]:
        """Return the finished requests that the runner still keeps, once each."""
        finished = self.finished_req_ids
        self.finished_req_ids = set()
        return finished

    def clear(self) -> None:
        """Remove all requests without releasing or reporting anything: the engine is broken."""
        self.by_key.clear()
        self.index.clear()
