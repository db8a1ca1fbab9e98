"""One try at a request: a leg on each of its workers, and their tokens in order.

1. ``begin`` binds the legs to their workers and sends ``Prefill`` and ``Decode`` at the same time.
2. What the workers send is processed when it arrives: a leg is unbound when its worker has no more work for it, however
   slowly the client reads.
3. ``next`` returns the tokens: the first one from the prefill worker, the others from the decode worker.
4. ``close`` unbinds the legs and cancels them on the workers that may still hold something.

An attempt goes on where the ones before it stopped: its prompt is the request's and the tokens that were delivered.
"""

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from contract.errors import ErrorKind, InternalError, KvbatonError, WorkerLostError
from contract.requests import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    ReceiveTransfer,
    SendTransfer,
    TokenLogprobs,
    TransferReport,
)
from protos import worker_pb2 as pb
from router.delivery import Delivery, Token, tokens_of
from router.inbox import Event, Inbox, UnreadAccount, size_of
from router.leg_requests import error_of, leg_request
from router.registry import AttachedWorker
from router.request import PreparedRequest
from router.tasks import TaskSet
from wire.legs import decode_to_proto, embed_to_proto, prefill_to_proto
from wire.tokens import output_from_proto

logger = logging.getLogger(__name__)

_MAYBE_ACCEPTED = (ErrorKind.WORKER_LOST, ErrorKind.DEADLINE)
_TOKEN_0_PATIENCE_SECONDS = 1.0
"""How long the failure of a decode leg waits for token 0, which may end the answer and make the failure irrelevant."""


@dataclass(frozen=True)
class Arrival:
    """Tokens that are due now, in order. ``finish_reason`` comes with the answer's last ones, or with its embedding."""

    tokens: list[Token]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    embedding: Sequence[float] = ()


@dataclass
class LegReport:
    """What the workers said: seconds, prompt tokens that nobody computed, the prompt's log probabilities."""

    prefill_seconds: float = 0.0
    transfer: TransferReport = field(default_factory=TransferReport)
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed. culprit: the worker whose leg failed. suspects: workers that may be at fault."""

    error: KvbatonError
    culprit: AttachedWorker
    suspects: frozenset[AttachedWorker]


class Leg:
    """One worker's part. ``may_hold``: the worker may still have the request in memory. refusal: why it did not accept."""

    def __init__(self, worker: AttachedWorker, first_index: int) -> None:
        self.worker = worker
        self.first_index = first_index
        self.next_index = first_index
        self.may_hold = True
        self.call: asyncio.Task[None] | None = None
        self.refusal: KvbatonError | None = None

    @property
    def has_spoken(self) -> bool:
        """True when a token of it has come: so it was accepted, whatever became of the call."""
        return self.next_index > self.first_index

    @property
    def is_over(self) -> bool:
        """True when nothing that happens to the worker matters to the request any more."""
        return not self.may_hold and self.has_spoken


class Attempt:
    """Owns the legs of one attempt. ``prefill`` is None where the decode worker computes the prompt itself.

    An embedding has one leg, in the decode worker's place, on a worker that computes prompts.

    delivered: the answer's tokens so far. report: where to note what the workers report about themselves. unread: counts
    what the client has not read. failure: set once the attempt has failed.
    """

    def __init__(
        self,
        request: PreparedRequest,
        delivered: Sequence[int],
        number: int,
        prefill: AttachedWorker | None,
        decode: AttachedWorker,
        tasks: TaskSet,
        report: LegReport,
        unread: UnreadAccount,
        max_unread_bytes: int,
    ) -> None:
        self._request = request
        self._prompt = [*request.prompt_token_ids, *delivered]
        self._key = (request.request_id, number, request.choice)
        self._tasks = tasks
        self._inbox: Inbox[Arrival] = Inbox(unread, max_unread_bytes, self._settle)
        self._delivery = Delivery(number, len(delivered))
        self._finish: tuple[FinishReason, int | None, Sequence[float]] | None = None
        self._num_early_bytes = 0
        self._report = report
        first = len(delivered)
        self._prefill = Leg(prefill, first) if prefill else None
        self._decode = Leg(decode, first + 1 if prefill else first)
        self._legs = [leg for leg in (self._prefill, self._decode) if leg]
        self._is_last_token = first + 1 >= request.sampling.max_tokens and not request.is_embedding
        self._postponed: tuple[Failure, asyncio.TimerHandle | None] | None = None
        self.failure: Failure | None = None

    @property
    def is_decoding(self) -> bool:
        """True when a token of the decode leg has come: the hand-over, if there was one, went well."""
        return self._decode.has_spoken

    @property
    def prefill_worker(self) -> AttachedWorker | None:
        """The worker that was asked to compute the prompt for another."""
        return self._prefill.worker if self._prefill else None

    @property
    def decode_worker(self) -> AttachedWorker:
        """The worker that decodes, or computes an embedding."""
        return self._decode.worker

    def begin(self, *others: "Attempt") -> Self:
        """Bind, and send both legs. Called once, at once after the workers were chosen.

        others: those of further choices of the same prompt, on the same workers: they are begun by the same legs.
        """
        attempts: list[Attempt] = [self, *others]
        for attempt in attempts:
            attempt._bind(num_prompt_tokens=len(self._prompt) if attempt is self else 0)
        num_choices = len(attempts)
        transfer_id, source = f"{self._key[0]}.{self._key[1]}.{secrets.token_hex(4)}", None
        if self._prefill:
            peer = self._prefill.worker.registration
            source = ReceiveTransfer(
                transfer_id=transfer_id,
                peer_worker_id=peer.worker_id,
                peer_boot_id=peer.boot_id,
                peer_control=peer.control_address,
            )
            worker = self._prefill.worker
            request = self._leg_request(self._prefill, num_choices, SendTransfer(transfer_id))
            legs = [(attempt, leg) for attempt in attempts if (leg := attempt._prefill)]
            self._send(legs, worker.calls.prefill(prefill_to_proto(request, worker.session)))
        worker = self._decode.worker
        request = self._leg_request(self._decode, num_choices, source)
        legs = [(attempt, attempt._decode) for attempt in attempts]
        if self._request.is_embedding:
            self._send(legs, worker.calls.embed(embed_to_proto(request, worker.session)))
        else:
            self._send(legs, worker.calls.decode(decode_to_proto(request, worker.session)))
        return self

    @property
    def calls(self) -> set[asyncio.Task[None]]:
        """The calls by which its legs are started; they end when the workers have answered."""
        return {leg.call for leg in self._legs if leg.call}

    def close(self) -> None:
        """End the attempt: unbind and cancel its legs, drop what is unread. Does nothing the second time."""
        self._settle()
        self._inbox.close()

    async def next(self) -> Arrival:
        """Return the next tokens. Raises what ended a leg (``failure`` then names the workers that may be at fault).

        WorkerLostError, the worker's own error; CancelledError when nobody has called for too many bytes.
        """
        return await self._inbox.get()

    def _bind(self, num_prompt_tokens: int) -> None:
        for leg in self._legs:
            num_answer_tokens = 0 if leg is self._prefill else self._request.num_answer_tokens
            num_tokens = num_prompt_tokens + num_answer_tokens
            leg.worker.bind(self._key, partial(self._receive, leg), num_tokens, self._request.tenant)

    def _settle(self) -> None:
        """Release the workers: unbind every leg and cancel those that may still be held."""
        self._drop_postponed()
        legs, self._legs = self._legs, []
        for leg in legs:
            leg.worker.unbind(self._key)
            if leg.may_hold and not leg.worker.gone.is_set():
                self._tasks.spawn(self._cancel(leg), f"cancel {self._key[0]} on {leg.worker.name}")

    def _receive(self, leg: Leg, event: Event) -> None:
        """Process an event of a leg at its arrival; what the client is due waits in the inbox."""
        if leg not in self._legs or leg.is_over or (leg.has_spoken and event is leg.refusal):
            return
        if isinstance(event, KvbatonError):
            self._fail(Failure(event, leg.worker, frozenset({leg.worker})), leg)
            return
        try:
            due = self._take(leg, event)
        except KvbatonError as error:
            suspects = self._suspects(leg, error)
            self._fail(Failure(error, leg.worker, suspects), leg)
            return
        self._deliver(due, size_of(event))
        if leg is self._prefill and leg.has_spoken and self._postponed:
            self._end_with(self._postponed[0])

    def _deliver(self, due: list[Token], num_bytes: int) -> None:
        self._num_early_bytes += num_bytes
        if self._finish and self._delivery.is_complete:
            self._settle()
            self._inbox.put(Arrival(due, *self._finish), self._num_early_bytes)
        elif due:
            self._inbox.put(Arrival(due), self._num_early_bytes)
        else:
            return
        self._num_early_bytes = 0

    def _suspects(self, leg: Leg, error: KvbatonError) -> frozenset[AttachedWorker]:
        """Return who may be at fault for an error in an entry: both ends of a hand-over that is not complete."""
        if error.kind is ErrorKind.WORKER_LOST and leg.may_hold:
            return frozenset({leg.worker})
        return frozenset(each.worker for each in self._legs if each.may_hold or each is leg)

    def _fail(self, failure: Failure, leg: Leg) -> None:
        """End the attempt, unless only a decode leg failed and token 0, still to come, may make that irrelevant."""
        is_needed = leg is not self._decode or self._prefill is None or self._prefill.has_spoken
        if is_needed or self._postponed:
            earlier = self._postponed[0].suspects if self._postponed else frozenset()
            self._end_with(replace(failure, suspects=failure.suspects | earlier))
            return
        timer = None
        if not self._is_last_token:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(_TOKEN_0_PATIENCE_SECONDS, self._end_with, failure)
        self._postponed = failure, timer
        if not leg.may_hold:
            leg.worker.unbind(self._key)

    def _end_with(self, failure: Failure) -> None:
        self._settle()
        if self.failure is None and not (self._finish and self._delivery.is_complete):
            self.failure = failure
            self._inbox.put(failure.error)

    def _drop_postponed(self) -> None:
        if self._postponed and (timer := self._postponed[1]):
            timer.cancel()

    def _take(self, leg: Leg, entry: pb.TokenEntry) -> list[Token]:
        output = output_from_proto(entry)
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            leg.may_hold = False
            raise error_of(output, leg.worker.name)
        if output.token_ids and output.first_index > leg.next_index:
            raise WorkerLostError(
                f"worker {leg.worker.name} sent token {output.first_index} after token {leg.next_index - 1}"
            )
        self._read_report(leg, output)
        leg.next_index = max(leg.next_index, output.first_index + len(output.token_ids))
        if output.finish_reason:
            if self._request.is_embedding and not output.pooled:
                raise InternalError(f"worker {leg.worker.name} has ended an embedding without one")
            self._finish = output.finish_reason, output.stop_reason, output.pooled or ()
            self._delivery.end = leg.next_index
            leg.may_hold = False
        if self._prefill and leg is self._decode and output.token_ids:
            self._prefill.may_hold = False  # the KV has been verified, and the lease released
        due = self._delivery.accept(output.attempt, tokens_of(output))
        for over in [each for each in self._legs if each.is_over]:
            over.worker.unbind(self._key)
        return due

    def _read_report(self, leg: Leg, output: EngineOutput) -> None:
        """Note what a worker measured. A replay's part counts only within the wait for token 0, or for token 1."""
        if output.first_index == 0 and output.num_cached_tokens is not None:
            self._report.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs:
            self._report.prompt_logprobs = output.prompt_logprobs
        if output.timings is not None:
            if output.first_index == 0:
                self._report.prefill_seconds = output.timings.prefill_seconds
            if leg is self._decode and leg.first_index == 1:
                self._report.transfer = output.timings.transfer

    def _send(self, legs: "list[tuple[Attempt, Leg]]", call: Coroutine[Any, Any, None]) -> None:
        """Send one call for all these legs of one worker."""
        worker = legs[0][1].worker
        task = self._tasks.spawn(_accepted(legs, call), f"start {self._key[0]} on {worker.name}")
        for _, leg in legs:
            leg.call = task

    def _refused(self, leg: Leg, error: KvbatonError) -> None:
        leg.may_hold = leg.may_hold and (leg.has_spoken or error.kind in _MAYBE_ACCEPTED)
        leg.refusal = error
        self._receive(leg, error)

    async def _cancel(self, leg: Leg) -> None:
        """Cancel behind the acceptance, so that the worker cannot see the cancel first."""
        if leg.call:
            await asyncio.wait({leg.call})
        if not leg.may_hold or leg.worker.gone.is_set():
            return
        try:
            await leg.worker.cancel(self._key)
        except KvbatonError as error:
            logger.warning("%s; the request's own deadline ends it there", error.message)

    def _leg_request(
        self, leg: Leg, num_choices: int, transfer: SendTransfer | ReceiveTransfer | None
    ) -> EngineRequest:
        return leg_request(
            self._request,
            attempt=self._key[1],
            prompt=self._prompt,
            first_index=leg.first_index,
            num_choices=num_choices,
            transfer=transfer,
        )


async def _accepted(legs: list[tuple[Attempt, Leg]], call: Coroutine[Any, Any, None]) -> None:
    try:
        await call
    except KvbatonError as error:
        for attempt, leg in legs:
            attempt._refused(leg, error)
