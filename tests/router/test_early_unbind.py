"""A leg is unbound when its worker has no more work for it; the client need not have read the answer for that."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from contract.errors import DeadlineError
from contract.identity import Role
from contract.membership import Registration
from contract.sampling import SamplingParams
from protos import worker_pb2 as pb
from router.admission.reservation import Reservation, StartLimiter
from router.attempts.attempt import Attempt, begin
from router.attempts.attempt_legs import AttemptLegs, Leg
from router.attempts.current_attempt import CurrentAttempt
from router.attempts.leg_outcome import LegReport
from router.attempts.leg_requests import AttemptTask
from router.intake.prepared_request import PreparedRequest
from router.routing.legs import DECODE, LEG_KINDS, PREFILL, LegPlan, place_legs
from router.routing.policy import PlacementRequest
from router.routing.running_shares import Held
from router.tokens.delivery import AttemptOutput
from router.tokens.inbox import UnreadBytes
from router.workers.attached_worker import AttachedWorker
from router.workers.order_stream import OrderStream


def orders_to(worker: AttachedWorker) -> list[str]:
    """Return the kinds of the orders that are on their way to the worker, in order."""
    taken = worker.orders.next_message()
    return [str(order.WhichOneof("order")) for order in taken[0].orders.orders] if taken else []


def attached(role: Role) -> AttachedWorker:
    registration = Registration(worker_id=role.value, role=role.value, max_model_len=100)
    return AttachedWorker(
        registration, cast(Any, None), OrderStream(role.value, 10.0), Held(), lambda *_: None
    )


def reservation_on(*workers: AttachedWorker) -> Reservation:
    placement = place_legs(*zip((PREFILL, DECODE), (worker.name for worker in workers), strict=True))
    start = StartLimiter(lambda: None).start("", is_alone=True)
    return Reservation(
        placement, workers, PlacementRequest(num_prompt_tokens=1, num_answer_tokens=5), "", start
    )


@contextmanager
def begun_on(prefill: AttachedWorker, decode: AttachedWorker, seconds: float) -> Iterator[Attempt]:
    """Begin an attempt on two workers, which has so many seconds until its deadline."""
    request = PreparedRequest(
        request_id="r",
        prompt_token_ids=[1],
        priority=0,
        cache_salt="",
        arrival=0.0,
        deadline=time.monotonic() + seconds,
        sampling=SamplingParams(max_tokens=5),
    )
    with UnreadBytes(1000, 10_000).open("") as account:
        legs = [
            Leg(LegPlan(PREFILL, prefill.name, 0), LEG_KINDS[PREFILL], prefill),
            Leg(LegPlan(DECODE, decode.name, 1), LEG_KINDS[DECODE], decode),
        ]
        attempt = Attempt(
            AttemptTask(request),
            AttemptLegs(legs),
            LegReport(),
            AttemptOutput(0, account, 1000, lambda batch: None),
            CurrentAttempt(),
        )
        begin([attempt], reservation_on(prefill, decode))
        assert (prefill.view().num_requests, decode.view().num_requests) == (1, 1)
        yield attempt
        attempt.close()


async def test_an_answer_that_ends_with_its_first_token_releases_both_workers_at_once() -> None:
    """H5: the decode leg, which is not needed any more, is unbound and cancelled before the client has read a token."""
    prefill, decode = attached(Role.PREFILL), attached(Role.DECODE)
    with begun_on(prefill, decode, seconds=60.0) as attempt:
        entry = pb.TokenEntry(request_id="r", first_index=0, token_ids=[7], finish_reason="stop")
        prefill.deliver(pb.StepOutput(entries=[entry]))
        assert (prefill.view().num_requests, decode.view().num_requests) == (0, 0)
        assert orders_to(decode) == ["decode", "cancel"]
        assert orders_to(prefill) == ["prefill"]
        async with asyncio.timeout(5):
            arrival = await attempt.next()
        assert [token.token_id for token in arrival.tokens] == [7]


async def test_the_deadline_releases_both_workers_however_slowly_the_client_reads() -> None:
    """The client still receives the tokens that arrived in time, and the error after them."""
    prefill, decode = attached(Role.PREFILL), attached(Role.DECODE)
    with begun_on(prefill, decode, seconds=0.1) as attempt:
        prefill.deliver(pb.StepOutput(entries=[pb.TokenEntry(request_id="r", first_index=0, token_ids=[7])]))
        async with asyncio.timeout(5):
            while decode.view().num_requests or prefill.view().num_requests:
                await asyncio.sleep(0.01)
            assert orders_to(decode) == ["decode", "cancel"]
            assert [token.token_id for token in (await attempt.next()).tokens] == [7]
            with pytest.raises(DeadlineError, match="with 1 tokens delivered"):
                await attempt.next()
        assert attempt.failure is None, "no other attempt follows"
