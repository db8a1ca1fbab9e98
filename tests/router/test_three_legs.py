"""A kind of leg that the router does not have needs a row of the table and a placement, and no change of attempts."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from contract.errors import OverloadedError
from contract.identity import Role
from contract.requests import EngineRequest, FinishReason, SamplingParams
from protos import worker_pb2_grpc
from router.attempt import Attempt
from router.changes import ChangeSignal
from router.fair_queue import Claim
from router.inbox import UnreadBytes
from router.ledger import Ledger
from router.legs import DECODE, LEG_KINDS, PREFILL, LegKind, LegPlan, Placement, Result
from router.membership import MembershipServicer
from router.metrics import RouterMetrics
from router.policy import Wish
from router.registry import Registry
from router.relay import Relays
from router.request import GenerationRequest, PreparedRequest
from router.running_shares import RunningShares
from router.severed import SeveredPairs
from router.tasks import TaskSet
from router.testing.script import Script, Writer
from router.testing.worker import ScriptedWorker
from router.waiting_line import WaitingLine
from router.worker_calls import WorkerCalls
from serving.cluster_tls import router_tls
from serving.grpc_options import internal_server_options
from serving.grpc_server import start_grpc
from tests.router.cluster import SECRET
from wire.legs import embed_to_proto

ENCODE = "encode"
TOKENS = [11, 12, 13, 14]
SLOW = Script(tokens=TOKENS, token_delay_seconds=0.2)
"""What the encoder sends comes first."""


def start_encode(calls: WorkerCalls, request: EngineRequest, session: str) -> Coroutine[Any, Any, None]:
    """An encoder has no call of its own: it is asked as a worker that embeds, and its answer is read by nobody here."""
    return calls.embed(embed_to_proto(request, session))


KINDS = {**LEG_KINDS, ENCODE: LegKind(start=start_encode, result=Result.NONE)}


class ThreeLegs(WaitingLine):
    """Places every request on the same three workers, at once."""

    async def bind(self, wish: Wish, claim: Claim, begin: Callable[[Placement], Attempt]) -> Attempt:
        """Begin an attempt of three legs."""
        first = wish.num_delivered
        legs = (
            LegPlan(ENCODE, "encode-0", first),
            LegPlan(PREFILL, "prefill-0", first),
            LegPlan(DECODE, "decode-0", first + 1),
        )
        return begin(Placement(legs))


@dataclass
class Trio:
    """Three scripted workers, and what runs requests on them."""

    encoder: ScriptedWorker
    prefill: ScriptedWorker
    decode: ScriptedWorker
    registry: Registry
    relays: Relays
    ledger: Ledger

    async def answer(self) -> tuple[list[int], FinishReason]:
        """Run one request; its tokens and how it ended. Nothing is bound behind it."""
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
            self.relays.unread.open("") as unread,
            self.ledger.open(asked) as record,
            self.relays.open(request, [record], unread) as (relay,),
        ):
            while reason is None:
                arrival = await relay.next()
                tokens += [token.token_id for token in arrival.tokens]
                reason = arrival.finish_reason
        assert [view.num_requests for view in self.registry.snapshot()] == [0, 0, 0]
        return tokens, reason


@asynccontextmanager
async def three_workers(encoder: Script | Writer) -> AsyncIterator[Trio]:
    """An encoder (which registers as a prefill worker), a prefill and a decode worker behind one registry."""
    changes = ChangeSignal()
    registry = Registry(changes)
    tasks = TaskSet()
    severed = SeveredPairs()
    line = ThreeLegs(registry, changes, severed, RunningShares(1.0), 0.0)
    relays = Relays(registry, line, severed, tasks, UnreadBytes(10_000, 100_000), 3, kinds=KINDS)
    cluster = router_tls(SECRET)
    server = grpc.aio.server(options=internal_server_options(3.0))
    worker_pb2_grpc.add_MembershipServicer_to_server(
        MembershipServicer(registry, "router-0", cluster, 5.0, 3.0), server
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
            while not all(view.max_requests for view in registry.snapshot()):
                await changes.next.wait()
        encode, prefiller, decode = workers
        yield Trio(encode, prefiller, decode, registry, relays, Ledger(10, RouterMetrics().requests))


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
