"""The requests that have not finished: how they are checked and added, and the one way in which all of them finish."""

from collections.abc import Callable
from dataclasses import dataclass

from contract.errors import InvalidRequestError, NotFoundError
from contract.outputs import TokenLogprobs
from contract.requests import EngineRequest, HandOff
from engine.scheduling.blocks.block_pool import blocks_needed
from engine.scheduling.blocks.cache_pools import CachePools
from engine.scheduling.remote_kv import RemoteKV
from engine.scheduling.requests.finish import HANDED_OFF, Finish
from engine.scheduling.requests.outbox import Outbox
from engine.scheduling.requests.queues import BatchQueues
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.request_index import RequestIndex
from engine.scheduling.stats import Totals
from engine.scheduling.waits.grammars import Grammars
from engine.scheduling.waits.waits import Deadline, Deadlines, Waits


@dataclass(frozen=True)
class Limits:
    """The largest request that an engine can run, and what it is checked against.

    max_length: tokens that prompt and answer may have together. num_blocks: usable KV blocks. vocab_size: bounds the token
    ids that another worker may send. model_fingerprint: what the hashes of computed blocks start from. max_prompt_tokens:
    tokens of a prompt that is computed here, if its chunks could not be; None: any.
    """

    max_length: int
    num_blocks: int
    vocab_size: int
    model_fingerprint: str
    max_prompt_tokens: int | None = None

    @classmethod
    def of(
        cls,
        pools: CachePools,
        max_model_len: int,
        vocab_size: int,
        model_fingerprint: str,
        max_prompt_tokens: int | None = None,
    ) -> "Limits":
        """Return the limits of an engine with these pools; the model's own length is ``max_model_len``."""
        max_length = pools.max_length(max_model_len)
        num_blocks = blocks_needed(max_length, pools.block_size)
        return cls(max_length, num_blocks, vocab_size, model_fingerprint, max_prompt_tokens)

    def why_impossible(self, request: Request) -> str | None:
        """Return why the request can never run in this engine; None if it can."""
        num_prompt = request.num_prompt_tokens
        if request.is_pooling and num_prompt > self.max_length:
            return (
                f"the prompt has {num_prompt} tokens; this engine takes {self.max_length} at most: shorten it"
            )
        if num_prompt + 1 > self.max_length and not request.is_pooling:
            return (
                f"the prompt has {num_prompt} tokens; with at least one token of answer this engine takes "
                f"{self.max_length - 1} at most: shorten it"
            )
        # Without what another worker has delivered: of an answer that was begun, no client expects this error.
        num_given = num_prompt - request.engine_request.num_delivered_tokens
        if not request.is_receiving and num_given > (self.max_prompt_tokens or num_given):
            return (
                f"the prompt has {num_given} tokens; with prefill-first no prompt is cut, and a step computes "
                f"{self.max_prompt_tokens}: shorten it or raise max_num_batched_tokens"
            )
        num_tokens = num_prompt + 1 if request.is_receiving else num_prompt
        num_blocks = blocks_needed(num_tokens, request.block_size)
        if num_blocks > self.num_blocks:
            return (
                f"the prompt of {num_prompt} tokens needs {num_blocks} KV blocks of {request.block_size} tokens, "
                f"the engine has {self.num_blocks}: shorten it or raise kv_cache_bytes"
            )
        return None


class LiveRequests:
    """Owns every unfinished request, with its deadlines and the outputs that are to be sent.

    finished_req_ids: finished requests that the runner still keeps. has_changes: something has changed since the last step
    was decided.
    """

    def __init__(
        self,
        pools: CachePools,
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
        self._pools = pools
        self._queues = queues
        self._waits = waits
        self._remote_kv = remote_kv

    def check(self, engine_request: EngineRequest) -> None:
        """Raise InvalidRequestError for a key or a transfer that is in use; see also ``SenderStage.check``."""
        is_live = any(key in self.by_key for key in engine_request.keys)
        is_lent = engine_request.key in self._remote_kv.sender.leases
        if is_live or is_lent or self._pools.first.is_quarantined(engine_request.key):
            raise InvalidRequestError(
                f"request {engine_request.key} is here already; a replay needs a higher attempt"
            )
        self._remote_kv.sender.check(engine_request, self.index)

    def start(self, request: Request) -> None:
        """Add a new request, which waits or is queued. Raises what a wait stage raises; then it was not added."""
        if not self._waits.start(request):
            self._queues.waiting.add(request)
        self.register(request)  # last: a stage may still reject it, and then nothing has changed

    def register(self, request: Request) -> None:
        """Add a request that waits or is queued already, with the deadline of its whole life."""
        self.by_key[request.key] = request
        self.index.add(request.engine_request, request.dismissed)
        self.deadlines.add(Deadline(request.expires, request.key, request.engine_request.deadline_seconds))

    def finish(
        self,
        request: Request,
        finish: Finish,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        pooled: list[float] | None = None,
    ) -> None:
        """Finish a request, whatever its status: release what it holds, and report it to its client and the runner."""
        # A wait or a lease may own its blocks: a read may still write into them, or another worker reads them.
        is_released = self._waits.give_up(request) or self._remote_kv.sender.abandon(request, finish)
        if not is_released:
            self._pools.free(request.key)
        self._queues.remove(request)
        del self.by_key[request.key]
        self.index.discard(request.key)
        self.deadlines.forget(request.key)
        # The runner keeps its tokens and sampling parameters until a step reports the end of the request to it.
        if request.is_known_to_runner:
            self.finished_req_ids.add(request.key)
        self.outbox.add(request, token_ids or [], finish, logprobs, pooled)
        self.has_changes = True

    def hand_off(self, order: HandOff) -> None:
        """Finish a request that decodes, and lend its KV to the attempt that continues it. Called between steps.

        Raises NotFoundError for a request that is not here, InvalidRequestError for one that has no KV to lend, or no token
        left to continue with. Then nothing has changed.
        """
        request = self.by_key.get(order.key)
        if request is None:
            raise NotFoundError(f"request {order.key} is not here; it may have finished")
        sender = self._remote_kv.sender
        continuation = sender.continuation_of(request, order)
        self.check(continuation)  # before anything changes
        sender.hand_off(request, continuation)
        self.finish(request, HANDED_OFF)

    def finish_overdue(self) -> None:
        """Finish the requests whose deadline, or whose current wait's deadline, has passed."""
        for deadline in self.deadlines.pop_expired():
            request = self.by_key.get(deadline.key)
            if request is None:  # one before it in this list has finished it
                continue
            if deadline.stage is None:
                self.finish(request, Finish.late(request.status, deadline.seconds))
            elif finish := self._waits.overdue(request, deadline):
                self.finish(request, finish)

    def clear(self) -> None:
        """Remove all requests without releasing or reporting anything: the engine is broken."""
        for request in self.by_key.values():
            self._queues.remove(request)  # the engine's last report counts them
        self.by_key.clear()
        self.index.clear()


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
        self.model_fingerprint = limits.model_fingerprint
        self._block_size = block_size
        self._clock = clock

    def prepare(self, engine_request: EngineRequest, then: Callable[[], None]) -> None:
        """Compile the grammar of a request that may be added later; see ``Grammars.prepare``."""
        self._grammars.check(engine_request)
        self._grammars.prepare(engine_request, then)

    def add(self, engine_request: EngineRequest) -> None:
        """Add a request; see ``Scheduler.add_request``."""
        self._live.check(engine_request)
        self._grammars.check(engine_request)
        request = Request.from_engine_request(
            engine_request,
            self.model_fingerprint,
            self._block_size,
            now=self._clock(),
            arrival_number=self._totals.num_requests,
        )
        # One number for each choice: ``Request.fork`` adds the choice to that of the request.
        self._totals.num_requests += engine_request.num_choices
        self._live.has_changes = True
        if reason := self._limits.why_impossible(request):
            self._live.outbox.add(request, [], Finish.refused(reason))
        else:
            self._live.start(request)
