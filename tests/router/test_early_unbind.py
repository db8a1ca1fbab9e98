"""A leg is unbound when its worker has no more work for it; the client need not have read the answer for that."""

import asyncio
import time

from contract.identity import Role
from contract.membership import Registration
from contract.sampling import SamplingParams
from protos import worker_pb2 as pb
from router.attached_worker import AttachedWorker
from router.attempt import Attempt, begin
from router.attempt_legs import AttemptLegs
from router.bound_leg import Leg
from router.inbox import UnreadBytes
from router.leg_report import LegReport
from router.leg_requests import AttemptTask
from router.legs import DECODE, LEG_KINDS, PREFILL, LegPlan, placed
from router.policy import PlacementRequest
from router.prepared_request import PreparedRequest
from router.reservation import Reservation
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
    return AttachedWorker(registration, _Calls(), lambda: None)  # type: ignore[arg-type]


def reservation_on(*workers: AttachedWorker) -> Reservation:
    placement = placed(*zip((PREFILL, DECODE), (worker.name for worker in workers), strict=True))
    start = StartLimiter(lambda: None).start("", is_alone=True)
    return Reservation(
        placement, workers, PlacementRequest(num_prompt_tokens=1, num_answer_tokens=5), "", start
    )


async def test_an_answer_that_ends_with_its_first_token_releases_both_workers_at_once() -> None:
    """H5: the decode leg, which is not needed any more, is unbound and cancelled before the client has read a token."""
    prefill, decode, tasks = attached(Role.PREFILL), attached(Role.DECODE), TaskSet()
    unread = UnreadBytes(1000, 10_000)
    request = PreparedRequest(
        request_id="r",
        prompt_token_ids=[1],
        priority=0,
        cache_salt="",
        arrival=0.0,
        deadline=time.monotonic() + 60,
        sampling=SamplingParams(max_tokens=5),
    )
    with unread.open("") as account:
        legs = [
            Leg(LegPlan(PREFILL, prefill.name, 0), LEG_KINDS[PREFILL], prefill),
            Leg(LegPlan(DECODE, decode.name, 1), LEG_KINDS[DECODE], decode),
        ]
        attempt = Attempt(AttemptTask(request), AttemptLegs(legs, tasks), LegReport(), account, 1000)
        begin([attempt], reservation_on(prefill, decode), tasks)
        assert (prefill.view().num_requests, decode.view().num_requests) == (1, 1)
        entry = pb.TokenEntry(request_id="r", first_index=0, token_ids=[7], finish_reason="stop")
        prefill.deliver(pb.StepOutput(entries=[entry]))
        assert (prefill.view().num_requests, decode.view().num_requests) == (0, 0)
        await tasks.close(5.0)
        assert decode.calls.cancelled == ["r"]  # type: ignore[attr-defined]
        async with asyncio.timeout(5):
            arrival = await attempt.next()
        assert [token.token_id for token in arrival.tokens] == [7]
        attempt.close()
