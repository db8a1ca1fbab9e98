"""The scheduler's two dealings with other workers' KV: lending a prompt's blocks, and waiting for somebody else's.

Each calls its role of the ``SchedulerConnector`` (see ``engine/connector.py`` for the order of the calls) and keeps the
books of the BlockPool in step with what may still be read or written from outside.
"""

from collections.abc import Collection, Mapping, Sequence

from contract.errors import ErrorKind, InvalidRequestError, TransferError
from contract.requests import EngineRequest
from engine.connector import (
    Drained,
    Failed,
    FirstToken,
    Published,
    Received,
    ReceiverConnector,
    SenderConnector,
)
from engine.scheduling.block_pool import BlockPool, blocks_needed
from engine.scheduling.ending import NOT_NEEDED, Ending, RequestStatus, ended_by_error, ended_late
from engine.scheduling.priority_queue import PriorityQueue, comes_first
from engine.scheduling.request import Request, ends_with_first_token
from engine.scheduling.request_index import RequestIndex
from engine.scheduling.waits import Ready

NOT_NEEDED_KIND = "not_needed"
"""The kind of a transfer that ended because token 0 was the whole answer; no error."""


def lease_holder(key: str) -> str:
    """The BlockPool's holder of blocks that a finished request still lends."""
    return f"lease:{key}"


class KVSender:
    """Lends the blocks of prefill legs. From the first ``publish`` until the connector says that nobody reads them any more.

    While the request runs its blocks are its own; when it ends their references belong to its lease.
    """

    def __init__(self, connector: SenderConnector, pool: BlockPool, max_model_len: int) -> None:
        self._connector = connector
        self._pool = pool
        self._max_model_len = max_model_len
        self._open: set[str] = set()
        self._leases = RequestIndex()

    @property
    def leases(self) -> Collection[str]:
        """Keys of ended requests whose blocks are still lent."""
        return self._leases.keys

    def lends_under(self, asked: EngineRequest) -> bool:
        """True when an ended request still lends its blocks under the same transfer and attempt."""
        return self._leases.uses_transfer(asked)

    def has_opened(self, request: Request) -> bool:
        """True when the blocks of the running request are lent."""
        return request.key in self._open

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """After the coming forward pass so much of the prompt is computed. The first call lends the blocks.

        They are those of the whole prompt, all reserved; ``request.num_computed_tokens`` of them are computed already.
        Nobody is shown any, computed or found in the cache, where the answer will end with its next token: the receiver
        would read for nothing.
        """
        is_needed = not ends_with_first_token(request, self._max_model_len)
        if request.key not in self._open:
            self._open.add(request.key)
            blocks = self._pool.table_of(request.key)
            num_cached = request.num_computed_tokens
            self._connector.open_send(request.asked, blocks, num_cached if is_needed else 0)
        if is_needed:
            self._connector.publish(request.key, num_computed_tokens)

    def finish(self, request: Request, first_tokens: Sequence[FirstToken]) -> None:
        """The prompt is computed, the answers go on at the receiver: one token for each choice."""
        self._connector.finish_send(request.key, list(first_tokens))
        self._lease(request)

    def abandon(self, request: Request, ending: Ending) -> None:
        """Nobody shall use the transfer: the answer ended at token 0, or there will be none."""
        if ending.error_kind is not None:
            kind = ending.error_kind
        elif ending.status is RequestStatus.FINISHED_ABORTED:
            kind = ErrorKind.CANCELLED.value
        else:
            kind = NOT_NEEDED_KIND
        self._connector.abandon_send(
            request.key, kind, ending.error_message or f"the prefill leg ended: {kind}"
        )
        self._lease(request)

    def take_back(self, keys: Collection[str]) -> None:
        """Nobody reads these any more (``finished_sending``): their leases end."""
        for key in keys:
            if self._leases.discard(key):
                self._pool.free(lease_holder(key))

    def withdraw(self, request_id: str, up_to_attempt: int | None, choice: int | None) -> None:
        """The client is gone: nobody needs what its ended legs still lend. Their leases end like all others.

        One that serves several choices ends when none of them is wanted any more.
        """
        for key in self._leases.dismiss(request_id, up_to_attempt, choice):
            self._connector.abandon_send(key, ErrorKind.CANCELLED, "the request was cancelled")

    def _lease(self, request: Request) -> None:
        self._open.remove(request.key)
        self._leases.add(request.asked, request.dismissed)
        self._pool.hand_over(request.key, lease_holder(request.key))


class KVReceiver:
    """The wait stage of KV that another worker computes. Owns the requests in WAITING_FOR_REMOTE_KVS.

    A request holds nothing until its sender computes the prompt. Then it is queued for blocks, and reserves
    ceil((prompt + 1) / block_size) of them, cached ones included, in one step or not at all (law 4). One that does not
    fit holds up those behind it, however small: they would pass a big one for ever. The blocks that it waits for are
    held by requests that run, whose reads are bounded in time, or that are behind it in the same queue; so they come.

    timeout_seconds: how long a request may wait here. num_needed_blocks: blocks that all reservations so far asked the
    senders for, beyond what the cache held.
    """

    name = "remote KV"
    status = RequestStatus.WAITING_FOR_REMOTE_KVS

    def __init__(self, connector: ReceiverConnector, pool: BlockPool, timeout_seconds: float) -> None:
        self._connector = connector
        self._pool = pool
        self.timeout_seconds = timeout_seconds
        self._waiting: dict[str, Request] = {}
        self._published = PriorityQueue()
        self._failures: dict[str, Failed] = {}
        self._arrived: list[str] = []
        self._num_cached_blocks: dict[str, int] = {}
        self.num_needed_blocks = 0

    @property
    def has_pending(self) -> bool:
        """Return whether a fetch has ended."""
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
        self._connector.start_fetch(request.asked)
        self._waiting[request.key] = request

    def take_events(self) -> None:
        """Record what the connector has reported."""
        for event in self._connector.take_events():
            match event:
                case Published(key, kv_fingerprint) if key in self._waiting:
                    if kv_fingerprint is not None:
                        self._waiting[key].hash_from(kv_fingerprint)
                    self._published.add(self._waiting[key])
                case Drained(key) if self._pool.is_quarantined(key):
                    self._pool.release_quarantine(key)
                case Failed(key) if key in self._waiting:
                    self._failures[key] = event

    def note_arrived(self, keys: Collection[str]) -> None:
        """Record the requests whose KV has landed and was verified (``finished_recving``)."""
        self._arrived += [key for key in keys if key in self._waiting]

    def take_ready(self) -> list[Ready]:
        """Return the requests whose transfer has failed, and those whose KV is there: ``received`` holds its description."""
        failed = [
            Ready(self._waiting[key], ending_of(failure))
            for key, failure in self._failures.items()
            if key in self._waiting
        ]
        keys = [key for key in self._arrived if key in self._waiting]
        self._arrived = []
        return failed + [Ready(self._arrive(key)) for key in keys]

    def reserve(self, num_promised: int, other: Request | None) -> None:
        """Give blocks to the requests in the queue, as far as those reach that are not promised; their reads begin.

        other: the first request elsewhere that waits for blocks; those that come after it wait with it.
        """
        while (request := self._published.first) and comes_first(request, other):
            size = self._pool.block_size
            cached = self._pool.find_cached(request.block_hashes)
            num_new = blocks_needed(request.num_prompt_tokens + 1, size) - len(cached)
            if not self._pool.can_allocate(num_new + num_promised, cached):
                return
            blocks = self._pool.allocate(request.key, num_new, cached)
            request.num_cached_tokens = len(cached) * size
            self._published.remove(request)
            self._num_cached_blocks[request.key] = len(cached)
            num_prompt_blocks = blocks_needed(request.num_prompt_tokens, size)
            self.num_needed_blocks += num_prompt_blocks - len(cached)
            self._connector.receive_into(request.key, blocks[:num_prompt_blocks], len(cached))

    def give_up(self, request: Request) -> bool:
        """Stop waiting: free what has been reserved, or quarantine it where a read into it cannot be stopped."""
        has_failed = request.key in self._failures
        num_shared = self._num_cached_blocks.get(request.key)
        self._forget(request)
        is_quiet = has_failed or self._connector.cancel_fetch(request.key)
        if is_quiet or num_shared is None:
            self._pool.free(request.key)
        else:
            self._pool.quarantine(request.key, num_shared)
        return True

    def overdue(self, request: Request, seconds: float) -> Ending:
        """Return how a request ends whose KV has not come after ``seconds``."""
        return ended_late(request.status, seconds)

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Assert that the requests in WAITING_FOR_REMOTE_KVS are those that wait here."""
        in_state = {key: one for key, one in requests.items() if one.status is self.status}
        assert in_state == self._waiting

    def _arrive(self, key: str) -> Request:
        request = self._waiting[key]
        self._forget(request)
        request.received = self._connector.take_received(key)
        return request

    def _forget(self, request: Request) -> None:
        del self._waiting[request.key]
        self._published.remove(request)
        self._failures.pop(request.key, None)
        self._num_cached_blocks.pop(request.key, None)


def check_transfer(asked: EngineRequest, sender: KVSender | None, index: RequestIndex) -> None:
    """Raise InvalidRequestError for a transfer that is in use, or in an engine without a connector (and so a sender)."""
    if sender is None:
        raise InvalidRequestError(f"request {asked.key} names a transfer, and this engine has no connector")
    if asked.transfer and (sender.lends_under(asked) or index.uses_transfer(asked)):
        raise InvalidRequestError(
            f"transfer {asked.transfer.transfer_id} (attempt {asked.attempt}) is here already; "
            "each request needs its own"
        )


def ending_of(failure: Failed) -> Ending:
    """How a request ends whose transfer did."""
    if failure.kind == NOT_NEEDED_KIND:
        return NOT_NEEDED
    return ended_by_error(failure.kind, failure.message)


def first_tokens_of(received: Received, num_choices: int, vocab_size: int) -> list[int]:
    """With which token each choice goes on here. Raises TransferError for what no honest sender sends."""
    tokens = [first.token_id for first in received.first_tokens]
    if len(tokens) != num_choices:
        raise TransferError(
            f"the transfer came with {len(tokens)} tokens that answers go on with; the request needs {num_choices}"
        )
    if bad := [token for token in tokens if not 0 <= token < vocab_size]:
        raise TransferError(
            f"the transfer came with token id {bad[0]}; the vocabulary has 0..{vocab_size - 1}"
        )
    return tokens
