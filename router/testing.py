"""A worker without an engine: it registers, accepts legs and answers them from a script, over real sockets.

For tests of the router and of whatever else speaks to one; nothing is patched.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import grpc.aio

from contract.errors import KvbatonError
from contract.identity import Role, new_boot_id
from contract.outputs import FinishReason
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from router.tasks import TaskSet
from serving.cluster_tls import ROUTER_NAME, worker_tls
from serving.errors import grpc_code
from serving.grpc_options import internal_channel_options, internal_server_options


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a worker answers to a request: the whole answer; each leg says its own part of it.

    tokens: cut at the request's max_tokens. finish_reason, stop_reason: of the last token, unless it was cut.
    stall_at: wait for ever before the token of this index. fail_at: end with ``error`` there. die_at: close the
    worker's stream there, without a word. gap_at: leave this token out. refuse: do not accept the leg at all.
    is_mute: play it, and never answer the call that brought it. token_delay_seconds: before each token.
    tokens_per_step: how many go out in one message. prompt_logprobs: of the prompt's tokens from the second on. embedding:
    what a task that asks for one gets, in the place of token 0.
    """

    tokens: Sequence[int] = ()
    finish_reason: FinishReason = FinishReason.STOP
    stop_reason: int | None = None
    stall_at: int | None = None
    fail_at: int | None = None
    error: KvbatonError = field(default_factory=lambda: KvbatonError("the script says so"))
    die_at: int | None = None
    gap_at: int | None = None
    refuse: KvbatonError | None = None
    is_mute: bool = False
    token_delay_seconds: float = 0.0
    tokens_per_step: int = 1
    timings: pb.LegTimings | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[float] = ()
    logprobs: Mapping[int, float] = field(default_factory=dict)
    embedding: Sequence[float] = (0.6, 0.8)


Writer = Callable[[pb.Task], Script]


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """A worker of any role. ``script`` is asked for the script of every choice of every task that it accepts.

    prefills, decodes, embeds, cancels: the requests that it got, in order.
    """

    def __init__(
        self,
        role: Role,
        router: str,
        secret: str,
        script: Writer,
        *,
        worker_id: str | None = None,
        model_files: Mapping[str, bytes] | None = None,
        registration: Mapping[str, Any] | None = None,
        credit: pb.Credit | None = None,
    ) -> None:
        self.prefills: list[pb.PrefillRequest] = []
        self.decodes: list[pb.DecodeRequest] = []
        self.embeds: list[pb.EmbedLegRequest] = []
        self.cancels: list[pb.CancelRequest] = []
        self.worker_id = worker_id or f"{role.value}-0"
        self._role = role
        self._router = router
        self._secret = secret
        self._boot_id = ""
        self._script = script
        self._model_files = dict(model_files or {})
        self.may_give_files = asyncio.Event()
        """Clear it to keep the router waiting for the model's files."""
        self.may_give_files.set()
        self._overrides = dict(registration or {})
        self._credit = credit or pb.Credit(max_requests=256, max_tokens=2**20)
        self._heard = asyncio.Condition()
        self._outbox: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()
        self._tasks = TaskSet()
        self._legs: dict[tuple[str, int, int], asyncio.Task[None]] = {}
        self._server: grpc.aio.Server | None = None
        self._channel: grpc.aio.Channel | None = None
        self._call: Any = None

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:  # also where it is cancelled: a server must not outlive its event loop
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, and attach to the router. Raises grpc.aio.AioRpcError when it refuses."""
        self._boot_id = new_boot_id()
        ids = {"worker_id": self.worker_id, "boot_id": self._boot_id, **self._overrides}
        tls = worker_tls(self._secret, ids["worker_id"], ids["boot_id"])
        self._server = grpc.aio.server(options=internal_server_options(3.0))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        address = f"127.0.0.1:{self._server.add_secure_port('127.0.0.1:0', tls.server_credentials)}"
        await self._server.start()
        self._channel = tls.channel(self._router, ROUTER_NAME, internal_channel_options())
        stub = worker_pb2_grpc.MembershipStub(self._channel)
        self._outbox.put_nowait(pb.WorkerMessage(registration=self._registration(address)))
        self._call = stub.Attach(self._messages())
        welcome = await self._call.read()
        if welcome is grpc.aio.EOF:
            raise grpc.aio.AioRpcError(
                await self._call.code(),
                await self._call.initial_metadata(),
                await self._call.trailing_metadata(),
                await self._call.details(),
            )
        self.grant(self._credit)

    async def stop(self) -> None:
        """Detach and stop listening; does nothing the second time."""
        await self.die()
        await self._tasks.close(0.0)
        if self._server:
            server = self._server
            self._server = None
            await server.stop(None)

    @property
    def is_dead(self) -> bool:
        """It has died, or was stopped."""
        return self._channel is None

    async def die(self) -> None:
        """Close the stream to the router at once, as a crash does."""
        if self._channel:
            channel = self._channel
            self._channel = None
            self._call.cancel()
            await channel.close()

    async def wait_for(self, is_true: Callable[["ScriptedWorker"], bool]) -> None:
        """Block until ``is_true`` of this worker; it is asked after every call that the worker gets."""
        async with self._heard:
            await self._heard.wait_for(lambda: is_true(self))

    def send(self, *entries: pb.TokenEntry, load: pb.Load | None = None) -> None:
        """Say something out of the script."""
        self._outbox.put_nowait(pb.WorkerMessage(step=pb.StepOutput(entries=entries, load=load)))

    def report(self, load: pb.Load) -> None:
        """Report a load."""
        self._outbox.put_nowait(pb.WorkerMessage(load=load))

    def grant(self, credit: pb.Credit) -> None:
        """Take on more or less from now on."""
        self._outbox.put_nowait(pb.WorkerMessage(credit=credit))

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Say the token of the task's first index."""
        self.prefills.append(request)
        return await self._accept(request.task, request.task.first_index + 1, context)

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Say the tokens from the task's first index on."""
        self.decodes.append(request)
        return await self._accept(request.task, None, context)

    async def Embed(self, request: pb.EmbedLegRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Say the embedding."""
        self.embeds.append(request)
        return await self._accept(request.task, None, context, is_embedding=True)

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Fall silent about a choice's attempts up to this one."""
        self.cancels.append(request)
        for (request_id, attempt, choice), leg in self._legs.items():
            if (request_id, choice) == (request.request_id, request.choice) and attempt <= request.attempt:
                leg.cancel()
        await self._tell()
        return pb.Accepted()

    async def GetModelFiles(  # noqa: N802
        self, request: pb.GetModelFilesRequest, context: Any
    ) -> AsyncIterator[pb.ModelFile]:
        """The files that it was made with, in two pieces each."""
        await self.may_give_files.wait()
        for name, data in self._model_files.items():
            half = len(data) // 2
            yield pb.ModelFile(name=name, data=data[:half])
            yield pb.ModelFile(name=name, data=data[half:])

    async def _accept(
        self, task: pb.Task, end: int | None, context: Any, *, is_embedding: bool = False
    ) -> pb.Accepted:
        first = task.choice
        for choice in range(first, first + max(1, task.num_choices)):
            own = pb.Task()
            own.CopyFrom(task)
            own.choice = choice
            script = self._script(own)
            if script.refuse:
                await self._tell()
                await context.abort(grpc_code(script.refuse.kind), script.refuse.message)
            play = self._play_embedding(own, script) if is_embedding else self._play(own, script, end)
            self._legs[task.request_id, task.attempt, choice] = self._tasks.spawn(
                play, f"{self.worker_id} plays {task.request_id}"
            )
        await self._tell()
        if script.is_mute:
            await asyncio.Event().wait()
        return pb.Accepted()

    async def _play(self, task: pb.Task, script: Script, end: int | None) -> None:
        """Say the tokens of this leg; a prefill leg says the finish only if its token is the last one."""
        total = min(len(script.tokens), task.sampling.max_tokens)
        stop = total if end is None else min(end, total)
        index = task.first_index
        while index < stop:
            if await self._disturbed(task, script, index):
                return
            size = 1 if _is_watched(script, index, script.tokens_per_step) else script.tokens_per_step
            chunk = script.tokens[index : min(index + size, stop)]
            if script.gap_at != index:
                self.send(self._entry(task, script, index, chunk, total))
            index += len(chunk)

    async def _play_embedding(self, task: pb.Task, script: Script) -> None:
        if not await self._disturbed(task, script, 0):
            entry = self._entry(task, script, 0, (), len(script.tokens))
            entry.finish_reason = FinishReason.STOP.value
            entry.pooled[:] = script.embedding
            self.send(entry)

    async def _disturbed(self, task: pb.Task, script: Script, index: int) -> bool:
        if script.token_delay_seconds:
            await asyncio.sleep(script.token_delay_seconds)
        if script.stall_at == index:
            await asyncio.Event().wait()
        if script.die_at == index:
            await self.die()
            return True
        if script.fail_at == index:
            self.send(
                pb.TokenEntry(
                    request_id=task.request_id,
                    attempt=task.attempt,
                    choice=task.choice,
                    finish_reason=FinishReason.ERROR.value,
                    error_kind=script.error.kind.value,
                    error_message=script.error.message,
                    error_param=script.error.param or "",
                )
            )
            return True
        return False

    def _entry(
        self, task: pb.Task, script: Script, index: int, chunk: Sequence[int], total: int
    ) -> pb.TokenEntry:
        is_first = index == task.first_index
        is_last = index + len(chunk) == total
        was_cut = total < len(script.tokens)
        reason = FinishReason.LENGTH if was_cut else script.finish_reason
        return pb.TokenEntry(
            request_id=task.request_id,
            attempt=task.attempt,
            choice=task.choice,
            first_index=index,
            token_ids=chunk,
            logprobs=[_logprobs(t, script) for t in chunk] if task.sampling.HasField("logprobs") else [],
            finish_reason=reason.value if is_last else "",
            stop_reason=script.stop_reason if is_last and not was_cut else None,
            num_cached_tokens=script.num_cached_tokens if is_first else None,
            prompt_logprobs=_prompt_logprobs(task, script) if index == 0 else [],
            timings=script.timings if is_first else None,
        )

    def _registration(self, address: str) -> pb.Registration:
        fields: dict[str, Any] = {
            "protocol_min": 1,
            "protocol_max": 1,
            "worker_id": self.worker_id,
            "boot_id": self._boot_id,
            "role": self._role.value,
            "address": address,
            "control_address": address,
            "model_name": "scripted",
            "model_fingerprint": "model-a@float32",
            "kv_layout": kv_layout(),
            "max_model_len": 4096,
            "num_blocks": 256,
            "vocab_size": 1000,
        }
        return pb.Registration(**(fields | self._overrides))

    async def _messages(self) -> AsyncIterator[pb.WorkerMessage]:
        while message := await self._outbox.get():
            yield message

    async def _tell(self) -> None:
        async with self._heard:
            self._heard.notify_all()


def kv_layout(block_size: int = 16, dtype: str = "float32") -> pb.KvLayout:
    """The shape of a scripted worker's blocks."""
    return pb.KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=block_size, dtype=dtype)


def _is_watched(script: Script, index: int, size: int) -> bool:
    marks = (script.stall_at, script.fail_at, script.die_at, script.gap_at)
    return any(mark is not None and index <= mark < index + size for mark in marks)


def _prompt_logprobs(task: pb.Task, script: Script) -> list[pb.PositionLogprobs]:
    if not task.sampling.HasField("prompt_logprobs"):
        return []
    told = zip(task.prompt_token_ids[1:], script.prompt_logprobs, strict=True)
    return [pb.PositionLogprobs(token_id=token, logprob=value, rank=1) for token, value in told]


def _logprobs(token: int, script: Script) -> pb.PositionLogprobs:
    """The script's own log probabilities, best first; the sampled token's is −1 where the script has none."""
    best = sorted(script.logprobs.items(), key=lambda item: -item[1])
    rank = next((i for i, (found, _) in enumerate(best, 1) if found == token), len(best) + 1)
    return pb.PositionLogprobs(
        token_id=token,
        logprob=script.logprobs.get(token, -1.0),
        rank=rank,
        top_token_ids=[found for found, _ in best],
        top_logprobs=[value for _, value in best],
    )
