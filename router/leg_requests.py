"""Builds what one leg of an attempt asks of its worker, and the error that it may end with."""

import time

from msgspec import structs

from contract.errors import KvbatonError, WorkerLostError, error_from_kind
from contract.requests import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    PoolingParams,
    ReceiveTransfer,
    SendTransfer,
)
from router.request import PreparedRequest

_MIN_DEADLINE_SECONDS = 0.001


def leg_request(
    request: PreparedRequest,
    *,
    attempt: int,
    prompt: list[int],
    first_index: int,
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
        first_index=first_index,
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        deadline_seconds=max(_MIN_DEADLINE_SECONDS, request.deadline - time.monotonic()),
        transfer=transfer,
        pooling_params=PoolingParams() if request.is_embedding else None,
    )


def error_of(output: EngineOutput, worker: str) -> KvbatonError:
    """Return the error with which a worker ended a leg."""
    if output.finish_reason is FinishReason.ABORT:
        return WorkerLostError(f"worker {worker} gave the request up")
    message = f"worker {worker}: {output.error_message or ''}"
    return error_from_kind(output.error_kind or "", message, output.error_param)
