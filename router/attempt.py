"""One try at a request: a leg on each of its workers, and their tokens in order.

1. ``begin`` binds the legs to their workers and starts all of them at the same time.
2. What the workers send is processed when it arrives: a leg is unbound when its worker has no more work for it, however
   slowly the client reads.
3. ``next`` returns the tokens. After a hand-over the first one comes from the prefill worker, the others from the decode
   worker.
4. ``close`` unbinds the legs and cancels them on the workers that may still hold something.

An attempt goes on where the ones before it stopped: its prompt is the request's and the tokens that were delivered. What
its legs have to do with each other follows from their order and from the table of kinds (``router/legs.py``).
"""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Self

from contract.errors import ErrorKind, InternalError, KvbatonError, WorkerLostError
from contract.requests import EngineOutput, FinishReason
from protos import worker_pb2 as pb
from router.bound_leg import Leg, start
from router.delivery import Delivery, Token, TokenBatch, tokens_of
from router.inbox import Event, Inbox, UnreadAccount, size_of
from router.leg_failure import Failure, PostponedFailure
from router.leg_report import LegReport
from router.leg_requests import error_of, leg_request, transfers_of
from router.legs import Result, Transfer
from router.registry import AttachedWorker
from router.request import PreparedRequest
from router.tasks import TaskSet
from wire.tokens import output_from_proto


class Attempt:
    """Owns the legs of one attempt, in the order in which one takes over from the other.

    delivered: the answer's tokens so far. report: where to note what the workers report about themselves. unread: counts
    what the client has not read. failure: set once the attempt has failed.
    """

    def __init__(
        self,
        request: PreparedRequest,
        delivered: Sequence[int],
        number: int,
        legs: Sequence[Leg],
        tasks: TaskSet,
        report: LegReport,
        unread: UnreadAccount,
        max_unread_bytes: int,
    ) -> None:
        self.legs = tuple(legs)
        self._request = request
        self._prompt = [*request.prompt_token_ids, *delivered]
        self._key = (request.request_id, number, request.choice)
        self._tasks = tasks
        self._inbox: Inbox[TokenBatch] = Inbox(unread, max_unread_bytes, self._settle)
        self._delivery = Delivery(number, len(delivered))
        self._finish: tuple[FinishReason, int | None, Sequence[float]] | None = None
        self._num_early_bytes = 0
        self._report = report
        self._open_legs = list(legs)
        self._postponed: PostponedFailure | None = None
        self.failure: Failure | None = None

    @property
    def is_decoding(self) -> bool:
        """True when a token of the last leg has come: the hand-over, if there was one, went well."""
        return self.legs[-1].has_spoken

    @property
    def hand_over(self) -> tuple[AttachedWorker, AttachedWorker] | None:
        """The workers that send and receive the prompt's KV; None where none is handed over."""
        for sender, receiver in pairwise(self.legs):
            if receiver.kind.transfer is Transfer.RECEIVE:
                return sender.worker, receiver.worker
        return None

    def begin(self, *others: "Attempt") -> Self:
        """Bind, and start every leg. Called once, at once after the workers were chosen.

        others: those of further choices of the same prompt, on the same workers: they are begun by the same legs.
        """
        attempts: list[Attempt] = [self, *others]
        self.bind(num_prompt_tokens=len(self._prompt))
        for other in others:
            other.bind(num_prompt_tokens=0)
        transfers = transfers_of(self.legs, f"{self._key[0]}.{self._key[1]}")
        for position, (leg, transfer) in enumerate(zip(self.legs, transfers, strict=True)):
            request = leg_request(
                self._request,
                leg,
                attempt=self._key[1],
                prompt=self._prompt,
                num_choices=len(attempts),
                transfer=transfer,
            )
            legs = [attempt.legs[position] for attempt in attempts]
            call = leg.kind.start(leg.worker.calls, request, leg.worker.session)
            task = self._tasks.spawn(start(legs, call), f"start {self._key[0]} on {leg.worker.name}")
            for each in legs:
                each.call = task
        return self

    def bind(self, num_prompt_tokens: int) -> None:
        """Bind every leg to its worker. The answer's tokens count where it ends."""
        for leg in self.legs:
            num_answer_tokens = self._request.num_answer_tokens if leg is self.legs[-1] else 0
            leg.bind(self._key, self._receive, num_prompt_tokens + num_answer_tokens, self._request.tenant)

    @property
    def calls(self) -> set[asyncio.Task[None]]:
        """The calls by which its legs are started; they end when the workers have answered."""
        return {leg.call for leg in self._open_legs if leg.call}

    def close(self) -> None:
        """End the attempt: unbind and cancel its legs, drop what is unread. Does nothing the second time."""
        self._settle()
        self._inbox.close()

    async def next(self) -> TokenBatch:
        """Return the next tokens. Raises what ended a leg (``failure`` then names the workers that may be at fault).

        WorkerLostError, the worker's own error; CancelledError when nobody has called for too many bytes.
        """
        return await self._inbox.get()

    def _settle(self) -> None:
        """Release the workers: unbind every leg and cancel those that may still be held."""
        if self._postponed:
            self._postponed.cancel()
        legs = self._open_legs
        self._open_legs = []
        for leg in legs:
            leg.unbind()
            if leg.may_hold and not leg.worker.gone.is_set():
                self._tasks.spawn(leg.cancel(), f"cancel {self._key[0]} on {leg.worker.name}")

    def _before(self, leg: Leg) -> tuple[Leg, ...]:
        """Return the legs whose work ``leg`` takes over."""
        return self.legs[: self.legs.index(leg)]

    def _is_needed(self, leg: Leg) -> bool:
        """Whether the answer cannot end before the leg's part of it: no token of an earlier leg is still to come."""
        return not any(each.is_awaited for each in self._before(leg))

    def _receive(self, leg: Leg, event: Event) -> None:
        """Process an event of a leg at its arrival; what the client is due waits in the inbox."""
        if leg not in self._open_legs or leg.is_over or (leg.has_spoken and event is leg.refusal):
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
        if self._postponed and self._is_needed(self._postponed.leg):
            self._end_with(self._postponed.failure)

    def _deliver(self, due: list[Token], num_bytes: int) -> None:
        self._num_early_bytes += num_bytes
        if self._finish and self._delivery.is_complete:
            self._settle()
            self._inbox.put(TokenBatch(due, *self._finish), self._num_early_bytes)
        elif due:
            self._inbox.put(TokenBatch(due), self._num_early_bytes)
        else:
            return
        self._num_early_bytes = 0

    def _suspects(self, leg: Leg, error: KvbatonError) -> frozenset[AttachedWorker]:
        """Return who may be at fault for an error in an entry: both ends of a hand-over that is not complete."""
        if error.kind is ErrorKind.WORKER_LOST and leg.may_hold:
            return frozenset({leg.worker})
        return frozenset(each.worker for each in self._open_legs if each.may_hold or each is leg)

    def _fail(self, failure: Failure, leg: Leg) -> None:
        """End the attempt, unless an earlier leg's token, still to come, may make the leg's failure irrelevant."""
        if self._postponed:
            self._end_with(failure.after(self._postponed.failure))
        elif self._is_needed(leg):
            self._end_with(failure)
        else:
            is_last_token = leg.first_index >= self._request.sampling.max_tokens
            self._postponed = PostponedFailure(failure, leg, self._end_with, is_last_token=is_last_token)
            if not leg.may_hold:
                leg.unbind()

    def _end_with(self, failure: Failure) -> None:
        self._settle()
        if self.failure is None and not (self._finish and self._delivery.is_complete):
            self.failure = failure
            self._inbox.put(failure.error)

    def _take(self, leg: Leg, entry: pb.TokenEntry) -> list[Token]:
        output = output_from_proto(entry)
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            leg.may_hold = False
            raise error_of(output, leg.worker.name)
        if output.token_ids and output.first_index > leg.next_index:
            raise WorkerLostError(
                f"worker {leg.worker.name} sent token {output.first_index} after token {leg.next_index - 1}"
            )
        self._report.add(output, has_transfer=leg is self.legs[-1] and leg.first_index == 1)
        leg.next_index = max(leg.next_index, output.first_index + len(output.token_ids))
        if output.finish_reason:
            self._take_end(leg, output, output.finish_reason)
        if output.token_ids:
            for earlier in self._before(leg):
                earlier.done()  # what it computed has been taken over, and its lease released
        due = self._delivery.accept(output.attempt, tokens_of(output))
        for over in [each for each in self._open_legs if each.is_over]:
            over.unbind()
        return due

    def _take_end(self, leg: Leg, output: EngineOutput, reason: FinishReason) -> None:
        """Note that a worker has done its part. That ends the answer if the leg contributes to it."""
        if leg.kind.result is Result.EMBEDDING and not output.pooled:
            raise InternalError(f"worker {leg.worker.name} has ended an embedding without one")
        if leg.kind.result is not Result.NONE:
            self._finish = reason, output.stop_reason, output.pooled or ()
            self._delivery.end = leg.next_index
        leg.done()
