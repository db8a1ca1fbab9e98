"""The hand-off of a request that decodes: its KV becomes a lease, and another worker continues the answer.

It happens between two steps, so that the tokens that were emitted are exactly the known ones: t0 to tk. The KV of all of
them but tk is in the request's blocks. What continues is a request whose prompt is the request's own prompt and t0 to
t(k-1), and whose first token is tk, as if this engine had computed it as a prefill leg:

1. The blocks pass to the lease of the continuation, which belongs to the next attempt. Nothing is computed for it.
2. The request finishes: its last output has ``handed_over`` and is sent at once.
3. The next step, which runs even if there is nothing to compute, orders the ranks to publish the blocks, and the transfer
   finishes with tk. From then on all rules of a hand-over after a prefill hold.
"""

from msgspec import structs

from contract.errors import InvalidRequestError, NotFoundError
from contract.requests import EngineRequest, HandOff, SendTransfer
from engine.scheduling.requests.finish import HANDED_OFF
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.status import RequestStatus
from engine.scheduling.scheduler import Scheduler


def hand_off(scheduler: Scheduler, order: HandOff) -> None:
    """Hand a request off. Called between steps.

    Raises NotFoundError for a request that is not here, InvalidRequestError for one that has no KV to lend, or no token left
    to continue with. Then nothing has changed.
    """
    request = scheduler.requests.get(order.key)
    if request is None:
        raise NotFoundError(f"request {order.key} is not here; it may have finished")
    if reason := _why_not(request):
        raise InvalidRequestError(f"request {order.key} is not handed off: {reason}")
    continuation = _continuation_of(request, order)
    scheduler.live.check(continuation)
    scheduler.remote_kv.hand_off(request, continuation)
    scheduler.live.finish(request, HANDED_OFF)


def _why_not(request: Request) -> str | None:
    """Return why a request cannot be handed off now, whatever is left of it; None if it can."""
    if request.is_sending:
        return "it is a prefill leg"
    if request.status is not RequestStatus.RUNNING or not request.is_decoding:
        return f"it does not decode, it is {request.status.name.lower()} with {request.num_missing_tokens} tokens to compute"
    # The receiver would hash it like KV that this engine computes (law 7).
    if not request.hashes.is_computed_here:
        return "its prompt's KV was computed in another precision"
    return None


def _continuation_of(request: Request, order: HandOff) -> EngineRequest:
    """Return the request that the receiver continues, as this engine serves it."""
    return structs.replace(
        request.asked,
        attempt=order.next_attempt,
        prompt_token_ids=request.token_ids[:-1],
        first_index=request.answer_length - 1,
        transfer=SendTransfer(order.transfer_id, may_change_receiver=True),
    )
