"""A kind of leg that the router does not have needs a row of the table and a placement, and no change of attempts."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from msgspec.structs import replace

from contract.errors import OverloadedError
from contract.identity import Role
from contract.outputs import FinishReason
from contract.requests import EngineRequest, PoolingParams
from contract.sampling import SamplingParams
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from router.admission.admission_queue import AdmissionQueue
from router.admission.fair_queue import QueueOrder
from router.admission.reservation import Reservation, StartLimiter
from router.admission.unreachable_pairs import UnreachablePairs
from router.attempts.request_run import RequestRuns
from router.attempts.request_tracker import RequestTracker
from router.attempts.suspects import Suspects
from router.concurrency import ChangeSignal, TaskSet
from router.intake.prepared_request import PreparedRequest
from router.intake.request import GenerationRequest
from router.migration.evacuation import Evacuation
from router.migration.migrator import Migrator
from router.ports.membership import MembershipServicer
from router.routing.legs import DECODE, LEG_KINDS, PREFILL, LegKind, LegPlan, Placement, Result
from router.routing.policy import PlacementRequest
from router.telemetry.metrics import RouterMetrics
from router.tokens.inbox import UnreadBytes
from router.workers.registry import Registry
from serving.cluster_tls import router_tls
from serving.grpc_options import internal_server_options, start_grpc
from tests.fakes.router.script import Script, Writer
from tests.fakes.router.worker import ScriptedWorker
from tests.router.cluster import SECRET
from wire.legs import embed_to_proto

ENCODE = "encode"
TOKENS = [11, 12, 13, 14]
SLOW = Script(tokens=TOKENS, token_delay_seconds=0.2)
"""A prefill that is slower than the encoder."""


def encode(request: EngineRequest, order: pb.Order) -> None:
    """Order an encoder as an embedding, since it has no order of its own. Its result is not read here."""
    embed_to_proto(replace(request, pooling_params=PoolingParams()), order.embed)


KINDS = {**LEG_KINDS, ENCODE: LegKind(write=encode, result=Result.NONE)}


class ThreeLegs(AdmissionQueue):
    """Places every request on the same three workers, at once."""

    def __init__(self, registry: Registry) -> None:
        self._workers = registry

    async def reserve(
        self, request: PlacementRequest, order: QueueOrder, deadline: float | None = None
    ) -> Reservation:
        """Reserve three legs."""
        first = request.num_delivered
        legs = (
            LegPlan(ENCODE, "encode-0", first),
            LegPlan(PREFILL, "prefill-0", first),
            LegPlan(DECODE, "decode-0", first + 1),
        )
        workers = [self._workers.get(leg.worker) for leg in legs]
        start = StartLimiter(lambda: None).start(order.tenant, is_alone=True)
        return Reservation(Placement(legs), workers, request, order.tenant, start)


@dataclass
class Trio:
    """Three scripted workers, and what runs requests on them."""

    encoder: ScriptedWorker
    prefill: ScriptedWorker
    decode: ScriptedWorker
    registry: Registry
    runs: RequestRuns
    tracker: RequestTracker

    async def answer(self) -> tuple[list[int], FinishReason]:
        """Run one request; return its tokens and how it ended. No credit is held afterwards."""
        asked = GenerationRequest(request_id="r", prompt="x")
        request = PreparedRequest(
            request_id="r",
            prompt_token_ids=[1, 2, 3],
            priority=0,
            cache_salt="",
            arrival=time.monotonic(),
            deadline=time.monotonic() + 30,
            sampling=SamplingParams(max_tokens=len(TOKENS)),
        )
        tokens: list[int] = []
        reason = None
        with (
            self.runs.unread.open("") as unread,
            self.tracker.open(asked) as tracked,
            self.runs.open(request, [tracked], unread) as (run,),
        ):
            while reason is None:
                batch = await run.next()
                tokens += [token.token_id for token in batch.tokens]
                reason = batch.finish_reason
        assert [view.num_requests for view in self.registry.views] == [0, 0, 0]
        return tokens, reason


@asynccontextmanager
async def three_workers(encoder: Script | Writer) -> AsyncIterator[Trio]:
    """Attach an encoder (which registers as a prefill worker), a prefill and a decode worker to one registry."""
    changes = ChangeSignal()
    registry = Registry(changes)
    tasks = TaskSet()
    unread = UnreadBytes(10_000, 100_000)
    runs = RequestRuns(ThreeLegs(registry), UnreachablePairs(), unread, 3, 3, Suspects(), kinds=KINDS)
    metrics = RouterMetrics()
    cluster = router_tls(SECRET)
    server = grpc.aio.server(options=internal_server_options(3.0))
    worker_pb2_grpc.add_MembershipServicer_to_server(
        MembershipServicer(
            registry,
            Evacuation(
                registry, runs, Migrator(registry, runs, metrics.moves), tasks, changes, metrics.drains
            ),
            "router-0",
            cluster,
            5.0,
            3.0,
        ),
        server,
    )
    address = await start_grpc(
        server, "127.0.0.1:0", param="internal", credentials=cluster.server_credentials
    )
    scripts = {"encode-0": encoder, "prefill-0": SLOW, "decode-0": SLOW}
    workers: list[ScriptedWorker] = []
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, None)
        stack.push_async_callback(tasks.close, 1.0)
        for name, script in scripts.items():
            role = Role.DECODE if name == "decode-0" else Role.PREFILL
            writer = (lambda _, script=script: script) if isinstance(script, Script) else script
            worker = ScriptedWorker(role, address, SECRET, writer, worker_id=name)
            workers.append(await stack.enter_async_context(worker))
        async with asyncio.timeout(10):
            while not all(view.max_requests for view in registry.views):
                await changes.next.wait()
        encode, prefiller, decode = workers
        yield Trio(encode, prefiller, decode, registry, runs, RequestTracker(10, RouterMetrics().requests))


@pytest.mark.parametrize("encoder", [Script(), Script(stall_at=0)], ids=["that ends", "that says nothing"])
async def test_an_attempt_runs_through_a_third_kind_of_leg(encoder: Script) -> None:
    """The end of the encoder's leg does not end the answer, and the prefill worker's token shows that it is over."""
    async with three_workers(encoder) as trio:
        assert await trio.answer() == (TOKENS, FinishReason.STOP)
        (encode,) = trio.encoder.received.embeds
        (prefill,) = trio.prefill.received.prefills
        (decode,) = trio.decode.received.decodes
        assert [leg.task.first_index for leg in (encode, prefill, decode)] == [0, 0, 1]
        assert decode.source.transfer_id == prefill.transfer_id
        assert decode.source.worker_id == "prefill-0"
        assert not trio.encoder.received.cancels


async def test_an_attempt_ends_when_its_third_leg_fails() -> None:
    """An encoder that fails is the attempt's failure, and the next attempt has three legs again."""

    def encoder(task: Any) -> Script:
        if task.attempt == 0:
            return Script(refuse=OverloadedError("no room"))
        return Script()

    async with three_workers(encoder) as trio:
        assert await trio.answer() == (TOKENS, FinishReason.STOP)
        assert [call.task.attempt for call in trio.encoder.received.embeds] == [0, 1]
        assert [call.task.attempt for call in trio.prefill.received.prefills] == [0, 1]
        await trio.prefill.received.wait_for(lambda worker: len(worker.cancels) == 1)
        await trio.decode.received.wait_for(lambda worker: len(worker.cancels) == 1)
        assert not trio.encoder.received.cancels
