"""Builds what one leg of an attempt asks of its worker, and the error that it may end with."""

import secrets
import time
from collections.abc import Sequence

from msgspec import structs

from contract.errors import KvbatonError, WorkerLostError, error_from_kind
from contract.outputs import EngineOutput, FinishReason
from contract.requests import EngineRequest, PoolingParams, ReceiveTransfer, SendTransfer
from router.bound_leg import Leg
from router.legs import Result, Transfer
from router.request import PreparedRequest

_MIN_DEADLINE_SECONDS = 0.001


def leg_request(
    request: PreparedRequest,
    leg: Leg,
    *,
    attempt: int,
    prompt: list[int],
    num_choices: int,
    transfer: SendTransfer | ReceiveTransfer | None,
) -> EngineRequest:
    """Build the engine's request for one leg, with the time that is left now.

    prompt: the request's prompt and the tokens that were delivered before this attempt. The log probabilities of a prompt
    that ends with delivered tokens are not asked for.
    """
    sampling = request.sampling
    if len(prompt) > len(request.prompt_token_ids):
        sampling = structs.replace(sampling, prompt_logprobs=None)
    return EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=prompt,
        sampling=sampling,
        eos_token_ids=request.eos_token_ids,
        attempt=attempt,
        choice=request.choice,
        num_choices=num_choices,
        first_index=leg.first_index,
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        deadline_seconds=max(_MIN_DEADLINE_SECONDS, request.deadline - time.monotonic()),
        transfer=transfer,
        pooling_params=PoolingParams() if leg.kind.result is Result.EMBEDDING else None,
    )


def transfers_of(legs: Sequence[Leg], name: str) -> list[SendTransfer | ReceiveTransfer | None]:
    """Return the transfer of each leg: one that receives takes what the leg before it sends. Ids begin with ``name``."""
    transfers: list[SendTransfer | ReceiveTransfer | None] = []
    for position, leg in enumerate(legs):
        match leg.kind.transfer:
            case Transfer.SEND:
                transfers.append(SendTransfer(f"{name}.{secrets.token_hex(4)}"))
            case Transfer.RECEIVE:
                transfers.append(_receiving(legs[position - 1], transfers[-1]))
            case Transfer.NONE:
                transfers.append(None)
    return transfers


def _receiving(sender: Leg, sent: SendTransfer | ReceiveTransfer | None) -> ReceiveTransfer:
    if not isinstance(sent, SendTransfer):
        raise TypeError(f"worker {sender.worker.name} sends nothing to the leg behind it")
    peer = sender.worker.registration
    return ReceiveTransfer(
        transfer_id=sent.transfer_id,
        peer_worker_id=peer.worker_id,
        peer_boot_id=peer.boot_id,
        peer_control=peer.control_address,
    )


def error_of(output: EngineOutput, worker: str) -> KvbatonError:
    """Return the error with which a worker ended a leg."""
    if output.finish_reason is FinishReason.ABORT:
        return WorkerLostError(f"worker {worker} gave the request up")
    message = f"worker {worker}: {output.error_message or ''}"
    return error_from_kind(output.error_kind or "", message, output.error_param)
