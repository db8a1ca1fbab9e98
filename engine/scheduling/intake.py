"""The way of a request into the scheduler: it is checked, and queued or made to wait."""

from collections.abc import Callable

from contract.requests import EngineRequest
from engine.scheduling.live_requests import LiveRequests
from engine.scheduling.requests.finish import Finish
from engine.scheduling.requests.limits import Limits
from engine.scheduling.requests.request import Request
from engine.scheduling.stats import Totals
from engine.scheduling.waits.grammars import Grammars


class Intake:
    """Checks new requests and adds them to the live ones."""

    def __init__(
        self,
        live: LiveRequests,
        grammars: Grammars,
        totals: Totals,
        limits: Limits,
        block_size: int,
        clock: Callable[[], float],
    ) -> None:
        self._live = live
        self._grammars = grammars
        self._totals = totals
        self._limits = limits
        self._block_size = block_size
        self._clock = clock

    def prepare(self, asked: EngineRequest, then: Callable[[], None]) -> None:
        """Compile the grammar of a request that may be added later; see ``Grammars.prepare``."""
        self._grammars.check(asked)
        self._grammars.prepare(asked, then)

    def add(self, asked: EngineRequest) -> None:
        """Add a request; see ``Scheduler.add_request``."""
        self._live.check(asked)
        self._grammars.check(asked)
        request = Request.from_engine_request(
            asked,
            self._limits.model_fingerprint,
            self._block_size,
            now=self._clock(),
            arrival_number=self._totals.num_requests,
        )
        self._totals.num_requests += asked.num_choices
        self._live.has_changes = True
        if reason := self._limits.why_impossible(request):
            self._live.outbox.add(request, [], Finish.refused(reason))
        else:
            self._live.start(request)
