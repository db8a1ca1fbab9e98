"""The receiving side of hand-overs: decode legs wait for KV that another worker computes."""

from collections.abc import Collection, Mapping, Sequence

from engine.connector import NOT_NEEDED_KIND, Drained, Failed, Published, ReceiverConnector
from engine.scheduling.blocks.block_pool import blocks_needed
from engine.scheduling.blocks.cache_pools import CachePools
from engine.scheduling.blocks.lent_blocks import (
    allocate_each,
    can_allocate_each,
    find_received,
    num_until_whole,
    plan_received,
    quarantine,
    received_tables,
    release_quarantine,
)
from engine.scheduling.requests.finish import NOT_NEEDED, Finish, RequestStatus
from engine.scheduling.requests.queues import PriorityQueue, comes_first
from engine.scheduling.requests.request import Request
from engine.scheduling.waits.waits import Ready


class KVReceiver:
    """Fulfils ``ReceiverWait``: the wait for KV of another worker. Owns the requests in WAITING_FOR_REMOTE_KVS.

    A request holds nothing until its sender computes the prompt. Then it is queued for blocks, and reserves
    ceil((prompt + 1) / block_size) of them, cached ones included, in one step or not at all (law 4). One that does not
    fit holds up those behind it, however small: they would pass a large one for ever. The blocks that it waits for are
    held by requests that run, whose reads are bounded in time, or that are behind it in the same queue; so they come.

    timeout_seconds: how long a request may wait here. num_needed_blocks: blocks that were requested from senders so far,
    beyond what the cache held.
    """

    name = "remote KV"
    status = RequestStatus.WAITING_FOR_REMOTE_KVS

    def __init__(self, connector: ReceiverConnector, pools: CachePools, timeout_seconds: float) -> None:
        self._connector = connector
        self._pools = pools
        self.timeout_seconds = timeout_seconds
        self._waiting: dict[str, Request] = {}
        self.waiting: Collection[str] = self._waiting
        self._published = PriorityQueue()
        self._failures: dict[str, Failed] = {}
        self._arrived: list[str] = []
        self._num_cached_blocks: dict[str, int] = {}
        self.num_needed_blocks = 0

    @property
    def has_pending(self) -> bool:
        """True while ``pop_ready`` would return something."""
        return bool(self._arrived or self._failures)

    @property
    def unserved(self) -> Request | None:
        """The first request in the queue for blocks: computed by its sender, and not reserved yet."""
        return self._published.first

    def needs_wait(self, request: Request) -> bool:
        """Return whether the request is a decode leg."""
        return request.is_receiving

    def start(self, request: Request) -> None:
        """Ask for the KV of a request. Raises what the connector raises, and then nothing has changed."""
        self._connector.start_fetch(request.engine_request)
        self._waiting[request.key] = request

    def process_events(self) -> None:
        """Record what the connector has reported."""
        for event in self._connector.pop_events():
            match event:
                case Published(key, kv_fingerprint) if key in self._waiting:
                    if kv_fingerprint is not None:
                        self._waiting[key].hash_from(kv_fingerprint)
                    self._published.add(self._waiting[key])
                case Drained(key):
                    release_quarantine(self._pools, key)
                case Failed(key) if key in self._waiting:
                    self._failures[key] = event

    def note_arrived(self, keys: Collection[str]) -> None:
        """Record the requests whose KV has landed and was verified (``finished_recving``)."""
        self._arrived += [key for key in keys if key in self._waiting]

    def pop_ready(self) -> list[Ready]:
        """Return the requests whose transfer has failed, and those whose KV is there, described by ``received``."""
        failed = []
        for key, failure in self._failures.items():
            if request := self._waiting.get(key):
                is_error = failure.kind != NOT_NEEDED_KIND
                finish = Finish.with_error(failure.kind, failure.message) if is_error else NOT_NEEDED
                failed.append(Ready(request, finish))
        arrived = [self._waiting[key] for key in self._arrived if key in self._waiting]
        self._arrived = []
        for request in arrived:
            self._forget(request)
            received = request.received = self._connector.pop_received(request.key)
            if received.lacks_heads:
                request.num_until_whole = num_until_whole(
                    self._pools, request.num_prompt_tokens, request.num_cached_blocks
                )
        return failed + [Ready(request) for request in arrived]

    def reserve(self, promised: Sequence[int], other: Request | None) -> None:
        """Give blocks to the requests in the queue, as long as unpromised ones are free; their reads start.

        promised: how many blocks each of some requests elsewhere lacks, which started because these were free.
        other: the first request elsewhere that waits for blocks; those that come after it get none.
        """
        while (request := self._published.first) and comes_first(request, other):
            size = self._pools.block_size
            cached = find_received(self._pools, request.block_hashes)
            num_cached = len(cached[0])
            # One token more than the prompt is reserved, so that the first step never waits for a block; it is not read.
            heads, numbers = plan_received(self._pools, request.num_prompt_tokens, cached)
            if not can_allocate_each(self._pools, numbers, heads, promised):
                return  # those behind it wait too, however small: they would pass it for ever
            tables = allocate_each(self._pools, request.key, numbers, heads)
            request.num_cached_tokens = num_cached * size
            self._published.remove(request)
            self._num_cached_blocks[request.key] = num_cached
            num_prompt_blocks = blocks_needed(request.num_prompt_tokens, size)
            self.num_needed_blocks += num_prompt_blocks - num_cached
            first, *others = received_tables(self._pools, request.key, tables, num_prompt_blocks)
            self._connector.receive_into(request.key, first, num_cached, others)

    def give_up(self, request: Request) -> bool:
        """Stop waiting: free what is reserved, or quarantine it if a read into it cannot be stopped."""
        has_failed = request.key in self._failures  # a failed transfer reads nothing any more
        num_shared = self._num_cached_blocks.get(request.key)
        self._forget(request)
        is_quiet = has_failed or self._connector.cancel_fetch(request.key)
        if is_quiet or num_shared is None:
            self._pools.free(request.key)
        else:
            quarantine(self._pools, request.key, num_shared)
        return True

    def overdue(self, request: Request, seconds: float) -> Finish:
        """Return how a request finishes whose KV has not come after ``seconds``."""
        return Finish.late(request.status, seconds)

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Assert that those who wait here are live, and in WAITING_FOR_REMOTE_KVS; others in it wait for a tier."""
        in_state = {key: one for key, one in requests.items() if one.status is self.status}
        assert self._waiting.items() <= in_state.items()

    def _forget(self, request: Request) -> None:
        del self._waiting[request.key]
        self._published.remove(request)
        self._failures.pop(request.key, None)
        self._num_cached_blocks.pop(request.key, None)
