"""The engine requests of an attempt's legs, and the error with which a worker ends a leg."""

import os
import time
from collections.abc import Iterable
from typing import NoReturn

import msgspec
from msgspec import structs

from contract.errors import ErrorKind, KvbatonError, WorkerLostError, error_from_kind
from contract.outputs import EngineOutput, FinishReason
from contract.requests import EngineRequest, ReceiveTransfer, SendTransfer
from router.attempts.attempt_legs import Leg
from router.intake.prepared_request import PreparedRequest
from router.routing.legs import Result, Transfer
from router.workers.attached_worker import LegKey

_MIN_DEADLINE_SECONDS = 0.001
_LOST = (ErrorKind.UNAVAILABLE, ErrorKind.CANCELLED)
"""Errors with which a worker that ends rejects a leg."""


class AttemptTask(msgspec.Struct, frozen=True):
    """The rest of one choice's answer, which an attempt has to compute.

    delivered: tokens that the client has already. number: how many attempts there were before.
    """

    request: PreparedRequest
    delivered: tuple[int, ...] = ()
    number: int = 0

    @property
    def key(self) -> LegKey:
        """The name of the attempt in everything that its workers send."""
        return self.request.request_id, self.number, self.request.choice

    @property
    def prompt(self) -> list[int]:
        """The request's prompt and the tokens that were delivered: the attempt continues behind them."""
        if not self.delivered:
            return self.request.prompt_token_ids
        return [*self.request.prompt_token_ids, *self.delivered]


def leg_request(
    task: AttemptTask, leg: Leg, *, num_choices: int, transfer: SendTransfer | ReceiveTransfer | None
) -> EngineRequest:
    """Build the engine's request for one leg, with the time that is left now.

    The log probabilities of a prompt that ends with delivered tokens are not asked for.
    """
    request = task.request
    sampling = request.sampling
    if task.delivered:
        sampling = structs.replace(sampling, prompt_logprobs=None)
    return EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=task.prompt,
        sampling=sampling,
        eos_token_ids=request.eos_token_ids,
        attempt=task.number,
        choice=request.choice,
        num_choices=num_choices,
        first_index=leg.first_index,
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        deadline_seconds=max(_MIN_DEADLINE_SECONDS, request.deadline - time.monotonic()),
        transfer=transfer,
        pooling_params=request.pooling if leg.kind.result is Result.EMBEDDING else None,
    )


def transfers_of(legs: Iterable[Leg], name: str) -> list[SendTransfer | ReceiveTransfer | None]:
    """Return the transfer of each leg. A leg that receives takes what the leg before it sends. Ids begin with ``name``."""
    transfers: list[SendTransfer | ReceiveTransfer | None] = []
    before: Leg | None = None
    for leg in legs:
        match leg.kind.transfer:
            case Transfer.SEND:
                transfers.append(SendTransfer(f"{name}.{os.urandom(4).hex()}"))
            case Transfer.RECEIVE:
                sent = transfers[-1] if transfers else None
                if before is None or not isinstance(sent, SendTransfer):
                    raise TypeError("a leg receives KV, and no leg before it sends any")
                transfers.append(receiving(before, sent))
            case Transfer.NONE:
                transfers.append(None)
        before = leg
    return transfers


def receiving(sender: Leg, sent: SendTransfer) -> ReceiveTransfer:
    """Return the transfer of a leg that receives what ``sender`` sends."""
    peer = sender.worker.registration
    return ReceiveTransfer(
        transfer_id=sent.transfer_id,
        peer_worker_id=peer.worker_id,
        peer_boot_id=peer.boot_id,
        peer_control=peer.control_address,
    )


def check_output(output: EngineOutput, request: PreparedRequest, most: int, worker: str) -> None:
    """Compare what a worker has sent for a leg with what it was asked for. most: tokens of the answer when the leg ends.

    Raises WorkerLostError, since another worker may compute the answer rightly.
    """
    token_ids = output.token_ids
    if token_ids:
        if max(token_ids) >= request.vocab_size:
            _raise_wrong(worker, f"token {max(token_ids)}; the vocabulary has {request.vocab_size}")
        end = output.first_index + len(token_ids)
        if end > most and request.plan.emits_tokens:
            _raise_wrong(worker, f"{end} tokens of an answer that has {most} at most")
        if request.sampling.logprobs is not None and len(output.logprobs or ()) != len(token_ids):
            _raise_wrong(worker, f"{len(output.logprobs or ())} log probabilities of {len(token_ids)} tokens")
    if output.num_cached_tokens is not None:
        num_prompt_tokens = len(request.prompt_token_ids)
        if output.first_index == 0 and output.num_cached_tokens > num_prompt_tokens:
            _raise_wrong(worker, f"{output.num_cached_tokens} cached tokens of {num_prompt_tokens}")
    if output.logprobs or output.prompt_logprobs:
        for each in (*(output.logprobs or ()), *(output.prompt_logprobs or ())):
            if max((each.token_id, *each.top_token_ids)) >= request.vocab_size:
                _raise_wrong(
                    worker, f"log probabilities of a token that the vocabulary of {request.vocab_size} lacks"
                )


def _raise_wrong(worker: str, what: str) -> NoReturn:
    raise WorkerLostError(f"worker {worker} is at fault: it sent {what}")


def error_of(output: EngineOutput, worker: str) -> KvbatonError:
    """Return the error with which a worker ended a leg."""
    if output.finish_reason is FinishReason.ABORT:
        return WorkerLostError(f"worker {worker} gave the request up")
    if not output.is_rejected:
        message = f"worker {worker}: {output.error_message or ''}"
        return error_from_kind(output.error_kind or "", message, output.error_param)
    message = f"worker {worker} has not accepted the request: {output.error_message or ''}"
    kind = ErrorKind.WORKER_LOST if output.error_kind in _LOST else output.error_kind
    return error_from_kind(kind or "", message, output.error_param)
