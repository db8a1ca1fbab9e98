"""One try at a request: a leg on each of its workers, and their tokens in order.

1. ``begin`` binds the legs to their workers and sends ``Prefill`` and ``Decode`` at the same time.
2. ``next`` gives the tokens as they come: the first one from the prefill worker, the others from the decode worker.
3. ``close`` unbinds the legs and cancels them on the workers that may still hold something.

An attempt goes on where the ones before it stopped: its prompt is the request's and the tokens that were delivered.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from contract.errors import ErrorKind, InternalError, KvbatonError, WorkerLostError, error_from_kind
from contract.requests import FinishReason, Grammar, SamplingParams, TokenLogprobs, TransferReport
from protos import worker_pb2 as pb
from router.delivery import Delivery, Token
from router.inbox import Event, Inbox
from router.registry import AttachedWorker
from router.request import PreparedRequest
from router.tasks import TaskSet

logger = logging.getLogger(__name__)

_MAYBE_ACCEPTED = (ErrorKind.WORKER_LOST, ErrorKind.DEADLINE)


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

    delivered: the answer's tokens so far. report: where to note what the workers say about themselves.
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
        max_unread_bytes: int,
    ) -> None:
        self._request = request
        self._prompt = [*request.prompt_token_ids, *delivered]
        self._has_delivered = bool(delivered)
        self._key = (request.request_id, number, request.choice)
        self._tasks = tasks
        self._inbox: Inbox[Leg] = Inbox(max_unread_bytes)
        self._delivery = Delivery(number, len(delivered))
        self._finish: tuple[FinishReason, int | None, Sequence[float]] | None = None
        self._report = report
        first = len(delivered)
        self._prefill = Leg(prefill, first) if prefill else None
        self._decode = Leg(decode, first + 1 if prefill else first)
        self._legs = [leg for leg in (self._prefill, self._decode) if leg]
        self.suspects: set[AttachedWorker] = set()

    @property
    def is_decoding(self) -> bool:
        """True when a token of the decode leg has come: the hand-over, if there was one, went well."""
        return self._decode.has_spoken

    @property
    def prefill_worker(self) -> str | None:
        """Id of the worker that was asked to compute the prompt for another."""
        return self._prefill.worker.name if self._prefill else None

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
            source = pb.TransferSource(
                transfer_id=transfer_id,
                worker_id=peer.worker_id,
                boot_id=peer.boot_id,
                control_address=peer.control_address,
            )
            prefill = pb.PrefillRequest(task=self._task(self._prefill, num_choices), transfer_id=transfer_id)
            legs = [(attempt, leg) for attempt in attempts if (leg := attempt._prefill)]
            self._send(legs, self._prefill.worker.calls.prefill(prefill))
        task, calls = self._task(self._decode, num_choices), self._decode.worker.calls
        legs = [(attempt, attempt._decode) for attempt in attempts]
        if self._request.is_embedding:
            self._send(legs, calls.embed(pb.EmbedLegRequest(task=task)))
        else:
            self._send(legs, calls.decode(pb.DecodeRequest(task=task, source=source)))
        return self

    def _bind(self, num_prompt_tokens: int) -> None:
        for leg in self._legs:
            num_answer_tokens = 0 if leg is self._prefill else self._request.num_answer_tokens
            leg.worker.bind(self._key, partial(self._hear, leg), num_prompt_tokens + num_answer_tokens)

    def close(self) -> None:
        """Unbind every leg; cancel those that may still be held. Does nothing the second time."""
        legs, self._legs = self._legs, []
        for leg in legs:
            leg.worker.unbind(self._key)
            if leg.may_hold and not leg.worker.gone.is_set():
                self._tasks.spawn(self._cancel(leg), f"cancel {self._key[0]} on {leg.worker.name}")

    async def next(self) -> Arrival:
        """The next tokens. Raises what ended a leg (``suspects`` then names the workers that may be at fault).

        WorkerLostError, the worker's own error; CancelledError when nobody has called for too many bytes.
        """
        while True:
            leg, event = await self._inbox.get()
            if leg.is_over or (leg.has_spoken and event is leg.refusal):
                continue
            if isinstance(event, KvbatonError):
                self.suspects = {leg.worker}
                raise event
            due = self._take(leg, event)
            if self._finish and self._delivery.is_complete:
                return Arrival(due, *self._finish)
            if due:
                return Arrival(due)

    def _hear(self, leg: Leg, event: Event) -> None:
        self._inbox.put(leg, event)
        if self._inbox.is_overfull:
            self.close()

    def _take(self, leg: Leg, entry: pb.TokenEntry) -> list[Token]:
        if entry.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            leg.may_hold = False
            self.suspects = {each.worker for each in self._legs if each.may_hold or each is leg}
            raise _error_of(entry, leg)
        if entry.token_ids and entry.first_index > leg.next_index:
            self.suspects = {leg.worker}
            raise WorkerLostError(
                f"worker {leg.worker.name} sent token {entry.first_index} after token {leg.next_index - 1}"
            )
        self._read_report(leg, entry)
        leg.next_index = max(leg.next_index, entry.first_index + len(entry.token_ids))
        if entry.finish_reason:
            stop_reason = entry.stop_reason if entry.HasField("stop_reason") else None
            if self._request.is_embedding and not entry.pooled:
                raise InternalError(f"worker {leg.worker.name} has ended an embedding without one")
            self._finish = FinishReason(entry.finish_reason), stop_reason, entry.pooled
            self._delivery.end = leg.next_index
            leg.may_hold = False
        if self._prefill and leg is self._decode and entry.token_ids:
            self._prefill.may_hold = False  # the KV has been verified, and the lease released
        due = self._delivery.accept(entry.attempt, _tokens_of(entry))
        for over in [each for each in self._legs if each.is_over]:
            over.worker.unbind(self._key)
        return due

    def _read_report(self, leg: Leg, entry: pb.TokenEntry) -> None:
        """Of a replay only what lies in the wait that is being measured: for token 0, or for token 1."""
        if entry.first_index == 0 and entry.HasField("num_cached_tokens"):
            self._report.num_cached_tokens = entry.num_cached_tokens
        if entry.prompt_logprobs:
            self._report.prompt_logprobs = [_logprobs_of(one) for one in entry.prompt_logprobs]
        if entry.HasField("timings"):
            if entry.first_index == 0:
                self._report.prefill_seconds = entry.timings.prefill_seconds
            if leg is self._decode and leg.first_index == 1:
                self._report.transfer = _transfer_report_of(entry.timings)

    def _send(self, legs: "list[tuple[Attempt, Leg]]", call: Coroutine[Any, Any, None]) -> None:
        """One call for all these legs of one worker."""
        worker = legs[0][1].worker
        task = self._tasks.spawn(_accepted(legs, call), f"start {self._key[0]} on {worker.name}")
        for _, leg in legs:
            leg.call = task

    def _refused(self, leg: Leg, error: KvbatonError) -> None:
        leg.may_hold = leg.may_hold and (leg.has_spoken or error.kind in _MAYBE_ACCEPTED)
        leg.refusal = error
        self._hear(leg, error)

    async def _cancel(self, leg: Leg) -> None:
        """Cancel behind the acceptance, so that the worker cannot see the cancel first."""
        if leg.call:
            await asyncio.wait({leg.call})
        if not leg.may_hold or leg.worker.gone.is_set():
            return
        try:
            await leg.worker.calls.cancel(*self._key)
        except KvbatonError as error:
            logger.warning("%s; the request's own deadline ends it there", error.message)

    def _task(self, leg: Leg, num_choices: int) -> pb.Task:
        request = self._request
        return pb.Task(
            request_id=request.request_id,
            attempt=self._key[1],
            choice=request.choice,
            num_choices=num_choices,
            first_index=leg.first_index,
            prompt_token_ids=self._prompt,
            sampling=None if request.is_embedding else self._sampling(request.sampling),
            eos_token_ids=request.eos_token_ids,
            priority=request.priority,
            cache_salt=request.cache_salt,
            deadline_seconds=max(0.001, request.deadline - time.monotonic()),
            session=leg.worker.session,
        )

    def _sampling(self, sampling: SamplingParams) -> pb.EngineSampling:
        return pb.EngineSampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            logprobs=sampling.logprobs,
            prompt_logprobs=None if self._has_delivered else sampling.prompt_logprobs,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            biased_token_ids=[token for token, _ in sampling.logit_bias],
            biases=[bias for _, bias in sampling.logit_bias],
            allowed_token_ids=sampling.allowed_token_ids,
            grammar=_grammar_to(sampling.grammar),
        )


async def _accepted(legs: list[tuple[Attempt, Leg]], call: Coroutine[Any, Any, None]) -> None:
    try:
        await call
    except KvbatonError as error:
        for attempt, leg in legs:
            attempt._refused(leg, error)


def _error_of(entry: pb.TokenEntry, leg: Leg) -> KvbatonError:
    if entry.finish_reason == FinishReason.ABORT:
        return WorkerLostError(f"worker {leg.worker.name} gave the request up")
    message = f"worker {leg.worker.name}: {entry.error_message}"
    return error_from_kind(entry.error_kind, message, entry.error_param or None)


def _grammar_to(grammar: Grammar | None) -> pb.Grammar | None:
    return None if grammar is None else pb.Grammar(kind=grammar.kind, text=grammar.text)


def _transfer_report_of(timings: pb.LegTimings) -> TransferReport:
    return TransferReport(
        timings.transfer_exposed_seconds,
        timings.transfer_hidden_seconds,
        timings.transfer_bytes,
        timings.transfer_pieces,
        timings.transfer_copying_seconds,
    )


def _logprobs_of(p: pb.PositionLogprobs) -> TokenLogprobs:
    return TokenLogprobs(p.token_id, p.logprob, p.rank, tuple(p.top_token_ids), tuple(p.top_logprobs))


def _tokens_of(entry: pb.TokenEntry) -> list[Token]:
    logprobs = [_logprobs_of(one) for one in entry.logprobs]
    return [
        Token(entry.first_index + i, token_id, logprobs[i] if i < len(logprobs) else None)
        for i, token_id in enumerate(entry.token_ids)
    ]
