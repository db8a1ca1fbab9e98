"""A worker without an engine for ``benchmarks.router``: at every step it emits a token for each of its requests."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import grpc.aio

from contract.identity import Role, new_boot_id
from contract.outputs import FinishReason
from protos import WORKER_PROTOCOL_MAX
from protos import worker_pb2 as pb
from serving.cluster_tls import worker_tls
from serving.grpc_options import internal_server_options
from tests.fakes.router.stream import RouterStream
from tests.fakes.router.worker import kv_layout
from text.model_card import ModelCard

_PEER_SECONDS = 30.0
_CREDIT = pb.Credit(max_requests=2**15, max_tokens=2**30)


_Key = tuple[str, int, int]


@dataclass
class _Leg:
    """A request that runs. router: index of the one it is of. end: index after the last token that this leg emits."""

    router: int
    task: pb.Task
    end: int
    next_index: int


@dataclass
class SteppingWorker:
    """Emits a token for each request every ``step_seconds``, all of a step in one message.

    token_ids: the texts of answers; each begins at a random place. idle_after: tokens after which an answer is silent until
    ``resume``.
    """

    token_ids: Sequence[int]
    step_seconds: float
    idle_after: int | None = None
    legs: dict[_Key, _Leg] = field(default_factory=dict)
    silent: dict[_Key, _Leg] = field(default_factory=dict)
    _is_busy: asyncio.Event = field(default_factory=asyncio.Event)

    def carry_out(self, router: int, order: pb.Order) -> bool:
        """Start a leg of a router, which emits one token or all of them, or stop a choice. Every order is carried out."""
        match order.WhichOneof("order"):
            case "prefill":
                task = order.prefill.task
                self._begin(router, task, task.first_index + 1)
            case "decode":
                task = order.decode.task
                self._begin(router, task, task.sampling.max_tokens)
            case "cancel":
                cancel = order.cancel
                for legs in (self.legs, self.silent):
                    legs.pop((cancel.request_id, cancel.attempt, cancel.choice), None)
        return True

    def resume(self) -> None:
        """Let the answers that are silent go on."""
        self.idle_after = None
        self.legs |= self.silent
        self.silent.clear()
        self._is_busy.set()

    async def run(self, streams: Sequence[RouterStream]) -> None:
        """Emit tokens until cancelled, each on the stream of its request's router."""
        while True:
            await self._is_busy.wait()
            await asyncio.sleep(self.step_seconds)
            entries: dict[int, list[pb.TokenEntry]] = {}
            for key, leg in list(self.legs.items()):
                entries.setdefault(leg.router, []).append(self._emit(key, leg))
            for router, own in entries.items():
                streams[router].send(*own)
            if not entries:
                self._is_busy.clear()

    def _begin(self, router: int, task: pb.Task, end: int) -> None:
        self.legs[task.request_id, task.attempt, task.choice] = _Leg(router, task, end, task.first_index)
        self._is_busy.set()

    def _emit(self, key: _Key, leg: _Leg) -> pb.TokenEntry:
        task = leg.task
        index = leg.next_index
        leg.next_index += 1
        if leg.next_index >= leg.end:
            del self.legs[key]
        elif self.idle_after is not None and leg.next_index >= self.idle_after:
            self.silent[key] = self.legs.pop(key)
        is_last = leg.next_index >= task.sampling.max_tokens
        return pb.TokenEntry(
            request_id=task.request_id,
            attempt=task.attempt,
            choice=task.choice,
            first_index=index,
            token_ids=[self.token_ids[(index + task.sampling.seed) % len(self.token_ids)]],
            finish_reason=FinishReason.LENGTH.value if is_last else "",
            num_cached_tokens=0 if index == 0 else None,
        )


_NUMBERS = count()


@asynccontextmanager
async def attached(
    worker: SteppingWorker, role: Role, routers: Sequence[str], secret: str, card: ModelCard
) -> AsyncIterator[None]:
    """Attach a worker to the routers at these internal addresses until the block ends. card: of its model."""
    worker_id = f"{role.value}-{next(_NUMBERS)}"
    boot_id = new_boot_id()
    tls = worker_tls(secret, worker_id, boot_id)
    server = grpc.aio.server(options=internal_server_options(_PEER_SECONDS))
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', tls.server_credentials)}"
    await server.start()
    streams = [RouterStream(router, partial(worker.carry_out, index)) for index, router in enumerate(routers)]
    registration = pb.Registration(
        protocol_min=WORKER_PROTOCOL_MAX,
        protocol_max=WORKER_PROTOCOL_MAX,
        worker_id=worker_id,
        boot_id=boot_id,
        role=role.value,
        address=address,
        control_address=address,
        model_name="m",
        model_fingerprint="benchmark@float32",
        kv_layout=kv_layout(),
        max_model_len=card.max_model_len,
        num_blocks=2**24,
        vocab_size=card.vocab_size,
    )
    try:
        for stream in streams:
            await stream.open(tls, registration)
            stream.grant(_CREDIT)
        stepping = asyncio.create_task(worker.run(streams))
        try:
            yield
        finally:
            stepping.cancel()
            await asyncio.wait({stepping})
    finally:
        for stream in streams:
            await stream.close()
        await server.stop(None)
