"""The way of a request into the scheduler: it is checked, and queued or made to wait."""

from collections.abc import Callable

from contract.errors import InvalidRequestError
from contract.requests import EngineRequest
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.finish import Finish
from engine.scheduling.grammars import Grammars
from engine.scheduling.limits import Limits
from engine.scheduling.live_requests import LiveRequests
from engine.scheduling.queues import BatchQueues
from engine.scheduling.remote_kv import RemoteKV
from engine.scheduling.request import Request
from engine.scheduling.stats import Totals
from engine.scheduling.waits import Waits


class Intake:
    """Checks new requests and adds them to the live ones."""

    def __init__(
        self,
        live: LiveRequests,
        pool: BlockPool,
        queues: BatchQueues,
        waits: Waits,
        remote_kv: RemoteKV,
        grammars: Grammars,
        totals: Totals,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self._live = live
        self._pool = pool
        self._queues = queues
        self._waits = waits
        self._remote_kv = remote_kv
        self._grammars = grammars
        self._totals = totals
        self._limits = limits
        self._clock = clock

    def add(self, asked: EngineRequest) -> None:
        """Add a request; see ``Scheduler.add_request``."""
        self._check(asked)
        request = Request.from_engine_request(
            asked,
            self._limits.model_fingerprint,
            self._pool.block_size,
            now=self._clock(),
            arrival_number=self._totals.num_requests,
        )
        self._totals.num_requests += asked.num_choices
        self._live.has_changes = True
        if reason := self._limits.why_impossible(request):
            self._live.outbox.add(request, [], Finish.refused(reason))
            return
        if not self._waits.start(request):
            self._queues.waiting.add(request)
        self._live.register(request)

    def _check(self, asked: EngineRequest) -> None:
        is_live = any(key in self._live.by_key for key in asked.keys)
        is_lent = asked.key in self._remote_kv.leases
        if is_live or is_lent or self._pool.is_quarantined(asked.key):
            raise InvalidRequestError(f"request {asked.key} is here already; a replay needs a higher attempt")
        self._remote_kv.check(asked, self._live.index)
        self._grammars.check(asked)
