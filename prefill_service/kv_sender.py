"""The sending side of hand-overs: the blocks of prefill legs, and of requests that are handed off, are lent.

They are lent until the receiver has read them.

A hand-off makes the KV of a request that decodes a lease, and another worker continues the answer. It happens between two
steps, so that the tokens that were emitted are exactly the known ones: t0 to tk. The KV of all of them but tk is in the
request's blocks. What continues is a request whose prompt is the request's own prompt and t0 to t(k-1), and whose first
token is tk, as if this engine had computed it as a prefill leg:

1. The blocks pass to the lease of the continuation, which belongs to the next attempt. Nothing is computed for it.
2. The request finishes: its last output has ``handed_over`` and is sent at once.
3. The next step, which runs even if there is nothing to compute, orders the ranks to publish the blocks, and the transfer
   finishes with tk. From then on all rules of a hand-over after a prefill hold.
"""

from collections.abc import Collection, Sequence

from msgspec import structs

from contract.errors import ErrorKind, InvalidRequestError
from contract.requests import EngineRequest, HandOff, SendTransfer
from engine.connector import NOT_NEEDED_KIND, FirstToken, SenderConnector
from engine.scheduling.blocks.block_pool import blocks_needed
from engine.scheduling.blocks.cache_pools import CachePools
from engine.scheduling.blocks.lent_blocks import hand_over, last_blocks
from engine.scheduling.remote_kv import lease_holder
from engine.scheduling.requests.finish import Finish, RequestStatus
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.request_index import RequestIndex
from engine.scheduling.requests.step_plan import StepPlan
from engine.scheduling.requests.stopping import ends_with_next_token


def _why_not(request: Request) -> str | None:
    """Return why a request cannot be handed off now, whatever is left of it; None if it can."""
    if request.is_sending:
        return "it is a prefill leg"
    if request.status is not RequestStatus.RUNNING or not request.is_decoding:
        return f"it does not decode, it is {request.status.name.lower()} with {request.num_missing_tokens} tokens to compute"
    # The receiver would hash it like KV that this engine computes (law 7).
    if not request.hashes.is_computed_here:
        return "its prompt's KV was computed in another precision"
    if request.num_computed_tokens < request.num_until_whole:
        return "its windows begin in a block of which a worker with smaller blocks has sent a part"
    return None


class KVSender:
    """Fulfils ``SenderStage``: lends the blocks of prefill legs.

    It does that from the first ``publish`` until the connector reports that no reader is left. While the request runs, it
    holds its blocks; when it finishes, their references pass to its lease. A request that is handed off while it decodes is
    computed already: its blocks pass to the lease of the attempt that continues it at once, and the transfer finishes when
    the ranks have been ordered to publish them.
    """

    def __init__(self, connector: SenderConnector, pools: CachePools, max_length: int) -> None:
        self._connector = connector
        self._pools = pools
        first = pools.groups[0]
        self._keeps_all = first.window is None and bool(first.layers)
        self._has_last = pools.has_windows or pools.states is not None
        self._max_length = max_length
        self._open: set[str] = set()
        self._leases = RequestIndex()
        self.leases: Collection[str] = self._leases.keys
        self._handed_off: dict[str, FirstToken] = {}

    def check(self, engine_request: EngineRequest, index: RequestIndex) -> None:
        """See SenderStage. A finished request that still lends its blocks uses its transfer, too."""
        if engine_request.transfer is not None and (
            self._leases.uses_transfer(engine_request) or index.uses_transfer(engine_request)
        ):
            raise InvalidRequestError(
                f"transfer {engine_request.transfer.transfer_id} (attempt {engine_request.attempt}) is here already; "
                "each request needs its own"
            )

    def publish(self, plan: StepPlan) -> None:
        """See SenderStage. The orders are carried out after the step's forward pass."""
        for entry in plan.entries.values():
            if entry.request.is_sending:
                self._publish(entry.request, entry.request.num_computed_tokens + entry.num_tokens)

    def _publish(self, request: Request, num_computed_tokens: int) -> None:
        """Order the ranks to publish up to ``num_computed_tokens``.

        The first call lends the blocks of the whole prompt. If the answer ends with its first token anyway, nothing is
        published, not even cached blocks: the receiver would read for nothing.
        """
        is_needed = not ends_with_next_token(request, self._max_length)
        if request.key not in self._open:
            self._open.add(request.key)
            blocks = self._pools.first.table_of(request.key) if self._keeps_all else []
            num_cached = request.num_computed_tokens
            self._connector.open_send(request.engine_request, blocks, num_cached if is_needed else 0)
        if is_needed:
            # The last of the prompt is computed by this step, so the blocks that its windows reach are all there.
            if self._has_last and num_computed_tokens == request.num_prompt_tokens:
                last = last_blocks(self._pools, request.key, num_computed_tokens)
                self._connector.publish(request.key, num_computed_tokens, last)
            else:
                self._connector.publish(request.key, num_computed_tokens)

    def finish(self, request: Request, first_tokens: Sequence[FirstToken]) -> None:
        """See SenderStage."""
        self._connector.finish_send(request.key, list(first_tokens))
        self._lease(request)

    def abandon(self, request: Request, finish: Finish) -> bool:
        """Abandon the transfer of a request that finishes: it ended here, by its first token, an error or an abort.

        Returns False if the request has lent no blocks, or its transfer is finished already.
        """
        if request.key not in self._open:
            return False
        if finish.error_kind is not None:
            kind = finish.error_kind
        elif finish.status is RequestStatus.FINISHED_ABORTED:
            kind = ErrorKind.CANCELLED.value
        else:
            kind = NOT_NEEDED_KIND
        message = finish.error_message or f"the prefill leg ended: {kind}"
        self._connector.abandon_send(request.key, kind, message)
        self._lease(request)
        return True

    def continuation_of(self, request: Request, order: HandOff) -> EngineRequest:
        """See SenderStage. Raises InvalidRequestError for a request that has no KV to lend."""
        if reason := _why_not(request):
            raise InvalidRequestError(f"request {order.key} is not handed off: {reason}")
        return structs.replace(
            request.engine_request,
            attempt=order.next_attempt,
            prompt_token_ids=request.token_ids[:-1],
            first_index=request.answer_length - 1,
            transfer=SendTransfer(order.transfer_id, may_change_receiver=True),
        )

    def hand_off(self, request: Request, continuation: EngineRequest) -> None:
        """Lend the KV of a request that decodes: of all its tokens but the newest, which ``continuation`` begins with.

        Raises InvalidRequestError if the next token ends the answer anyway.
        """
        if ends_with_next_token(request, self._max_length):
            raise InvalidRequestError(f"request {request.key} is not handed off: one token of it is left")
        num_tokens = len(continuation.prompt_token_ids)
        blocks = []
        if self._keeps_all:
            num_blocks = blocks_needed(num_tokens, self._pools.block_size)
            blocks = self._pools.first.table_of(request.key)[:num_blocks]
        self._connector.open_send(
            continuation, blocks, num_tokens, last_blocks(self._pools, request.key, num_tokens)
        )
        self._handed_off[continuation.key] = FirstToken(request.token_ids[-1])
        self._leases.add(continuation, set())
        hand_over(self._pools, request.key, lease_holder(continuation.key))

    def finish_handed_off(self) -> None:
        """Send the newest tokens of requests that were handed off; the ranks have the orders to publish their blocks."""
        for key, token in self._handed_off.items():
            self._connector.finish_send(key, [token])
        self._handed_off.clear()

    def end_leases(self, keys: Collection[str]) -> None:
        """Free the blocks of these requests, which have no reader any more (``finished_sending``)."""
        for key in keys:
            if self._leases.discard(key):
                self._pools.free(lease_holder(key))

    def withdraw(self, request_id: str, up_to_attempt: int | None, choice: int | None) -> None:
        """Abandon what finished legs of a cancelled request still lend. Their leases end like all others.

        A leg that serves several choices is abandoned when all of them are cancelled.
        """
        for key in self._leases.dismiss(request_id, up_to_attempt, choice):
            self._handed_off.pop(key, None)
            self._connector.abandon_send(key, ErrorKind.CANCELLED, "the request was cancelled")

    def _lease(self, request: Request) -> None:
        self._open.remove(request.key)
        self._leases.add(request.engine_request, request.dismissed)
        hand_over(self._pools, request.key, lease_holder(request.key))
