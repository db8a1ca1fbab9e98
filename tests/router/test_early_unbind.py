"""A leg is unbound when its worker has no more work for it; the client need not have read the answer for that."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from contract.errors import DeadlineError
from contract.identity import Role
from contract.membership import Registration
from contract.sampling import SamplingParams
from protos import worker_pb2 as pb
from router.attached_worker import AttachedWorker
from router.attempt import Attempt, begin
from router.attempt_legs import AttemptLegs
from router.attempt_output import AttemptOutput
from router.bound_leg import Leg
from router.inbox import UnreadBytes
from router.leg_report import LegReport
from router.leg_requests import AttemptTask
from router.legs import DECODE, LEG_KINDS, PREFILL, LegPlan, placed
from router.policy import PlacementRequest
from router.prepared_request import PreparedRequest
from router.reservation import Reservation
from router.running_shares import Held
from router.start_limiter import StartLimiter
from router.tasks import TaskSet


class _Calls:
    """Accepts everything."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    async def prefill(self, request: pb.PrefillRequest) -> None:
        """Accept."""

    async def decode(self, request: pb.DecodeRequest) -> None:
        """Accept."""

    async def cancel(self, request_id: str, attempt: int, choice: int) -> None:
        """Record it."""
        self.cancelled.append(request_id)


def attached(role: Role) -> AttachedWorker:
    registration = Registration(worker_id=role.value, role=role.value, max_model_len=100)
    return AttachedWorker(registration, _Calls(), Held(), lambda *_: None)  # type: ignore[arg-type]


def reservation_on(*workers: AttachedWorker) -> Reservation:
    placement = placed(*zip((PREFILL, DECODE), (worker.name for worker in workers), strict=True))
    start = StartLimiter(lambda: None).start("", is_alone=True)
    return Reservation(
        placement, workers, PlacementRequest(num_prompt_tokens=1, num_answer_tokens=5), "", start
    )


@contextmanager
def begun_on(
    prefill: AttachedWorker, decode: AttachedWorker, tasks: TaskSet, seconds: float
) -> Iterator[Attempt]:
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
            AttemptTask(request), AttemptLegs(legs, tasks), LegReport(), AttemptOutput(0, account, 1000)
        )
        begin([attempt], reservation_on(prefill, decode), tasks)
        assert (prefill.view().num_requests, decode.view().num_requests) == (1, 1)
        yield attempt
        attempt.close()


async def test_an_answer_that_ends_with_its_first_token_releases_both_workers_at_once() -> None:
    """H5: the decode leg, which is not needed any more, is unbound and cancelled before the client has read a token."""
    prefill, decode, tasks = attached(Role.PREFILL), attached(Role.DECODE), TaskSet()
    with begun_on(prefill, decode, tasks, seconds=60.0) as attempt:
        entry = pb.TokenEntry(request_id="r", first_index=0, token_ids=[7], finish_reason="stop")
        prefill.deliver(pb.StepOutput(entries=[entry]))
        assert (prefill.view().num_requests, decode.view().num_requests) == (0, 0)
        await tasks.close(5.0)
        assert decode.calls.cancelled == ["r"]  # type: ignore[attr-defined]
        async with asyncio.timeout(5):
            arrival = await attempt.next()
        assert [token.token_id for token in arrival.tokens] == [7]


async def test_the_deadline_releases_both_workers_however_slowly_the_client_reads() -> None:
    """The client still receives the tokens that arrived in time, and the error after them."""
    prefill, decode, tasks = attached(Role.PREFILL), attached(Role.DECODE), TaskSet()
    with begun_on(prefill, decode, tasks, seconds=0.1) as attempt:
        prefill.deliver(pb.StepOutput(entries=[pb.TokenEntry(request_id="r", first_index=0, token_ids=[7])]))
        async with asyncio.timeout(5):
            while decode.view().num_requests or prefill.view().num_requests:
                await asyncio.sleep(0.01)
            await tasks.close(5.0)
            assert decode.calls.cancelled == ["r"]  # type: ignore[attr-defined]
            assert [token.token_id for token in (await attempt.next()).tokens] == [7]
            with pytest.raises(DeadlineError, match="with 1 tokens delivered"):
                await attempt.next()
        assert attempt.failure is None, "no other attempt follows"
