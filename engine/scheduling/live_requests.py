"""The requests that have not ended: how they come to be known, and the one way in which all of them end."""

from contract.outputs import TokenLogprobs
from engine.scheduling.batching import Batcher
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.deadlines import Deadline, Deadlines
from engine.scheduling.ending import Ending
from engine.scheduling.outbox import Outbox
from engine.scheduling.remote_kv import KVSender
from engine.scheduling.request import Request
from engine.scheduling.request_index import RequestIndex
from engine.scheduling.waits import Waits


class LiveRequests:
    """Owns every unfinished request.

    finished_req_ids: ended requests of which the runner was not told yet. has_news: something has changed since the last
    step was decided.
    """

    def __init__(
        self,
        pool: BlockPool,
        batcher: Batcher,
        waits: Waits,
        sender: KVSender | None,
        deadlines: Deadlines,
        outbox: Outbox,
    ) -> None:
        self.by_key: dict[str, Request] = {}
        self.index = RequestIndex()
        self.finished_req_ids: set[str] = set()
        self.has_news = False
        self._pool = pool
        self._batcher = batcher
        self._waits = waits
        self._sender = sender
        self._deadlines = deadlines
        self._outbox = outbox

    def register(self, request: Request) -> None:
        """Make a new request known, with the deadline of its whole life."""
        self.by_key[request.key] = request
        self.index.add(request.asked, request.dismissed)
        self._deadlines.add(Deadline(request.expires, request.key, request.asked.deadline_seconds))

    def finish(
        self,
        request: Request,
        ending: Ending,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        pooled: list[float] | None = None,
    ) -> None:
        """End a request in whatever state it is: give back what it holds, and report it to its client and the runner."""
        if not self._waits.give_up(request):
            if self._sender and self._sender.has_opened(request):
                self._sender.abandon(request, ending)
            else:
                self._pool.free(request.key)
        self._batcher.remove(request)
        del self.by_key[request.key]
        self.index.discard(request.key)
        self._deadlines.forget(request.key)
        if request.is_known_to_runner:
            self.finished_req_ids.add(request.key)
        self._outbox.tokens(request, token_ids or [], ending, logprobs, pooled)
        self.has_news = True

    def take_finished(self) -> set[str]:
        """Return the ended requests of which the runner was not told, once."""
        finished = self.finished_req_ids
        self.finished_req_ids = set()
        return finished

    def clear(self) -> None:
        """Forget all requests, without a word to anybody: the engine is broken."""
        self.by_key.clear()
        self.index.clear()
