"""One rank's part in its group: a thread with its RPC server, and on rank 0 the coordinator's, in the engine's process.

A group works as a whole or not at all: the ranks wait for each other within their forward passes, and a pass without one of
them never ends. So the coordinator keeps a call open to each participant (``Watch``). If a process ends, or does not answer
pings for the group's timeout, the call ends on both sides; then rank 0's process ends itself, and with it all calls, and
every other rank ends itself too. Routers see dead workers, and recover their requests elsewhere.
"""

import asyncio
import logging
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError as ThreadCancelledError
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from contract.addresses import join_address, split_address
from contract.errors import KvbatonError, SettingError, UnavailableError, WorkerLostError
from contract.processes import RunFolder
from data_parallel.options import GroupPlan
from data_parallel.shared_steps import SharedSteps, create_steps, machine_identity
from data_parallel.steps import CoordinatorSteps, ParticipantSteps, PartInfo
from engine.stepping.loop import Put
from protos import group_pb2 as pb
from protos import group_pb2_grpc
from serving.cluster_tls import ClusterTls, Party
from serving.errors import abort
from serving.grpc_options import internal_server_options, internal_stream_options, start_grpc
from wire.messages import check_numbers

logger = logging.getLogger(__name__)

_GROUP_NAME = "group.kvbaton.internal"
_RETRY_SECONDS = 0.2
_STOP_GRACE_SECONDS = 0.2
_T = TypeVar("_T")
_OK = pb.GroupAccepted()
Die = Callable[[str], None]
OpenStore = Callable[[], int]
"""Opens the store at which the ranks' collectives find each other; returns its port. Rank 0 only."""


def end_process(reason: str) -> None:
    """End this process at once, also while its other threads wait for a rank that is gone."""
    logger.critical("%s: this process ends, since no rank can step without the others", reason)
    logging.shutdown()
    os._exit(1)


class Member:
    """A rank of a group, which all ranks have joined when the constructor returns. ``put``, ``open_store``: see above.

    steps: belongs to the engine's thread. store_address: of the store at which the collectives find each other. counts: the
    calls that were sent and received, by name. die: called, in the member's thread, when the group is broken.

    Raises UnavailableError if the others do not come in time, SettingError if the address cannot be bound or the group has
    another size or a rank of this number.
    """

    def __init__(self, plan: GroupPlan, put: Put, open_store: OpenStore, die: Die = end_process) -> None:
        self.steps = ParticipantSteps()
        self.is_over = False
        self.store_address = ""
        self.counts: Counter[str] = Counter()
        self.plan = plan
        self.put = put
        self._die = die
        self._shared: SharedSteps | None = None
        self._rpc = _Rpc(plan)
        self._coordinator = _Coordinator(self, self._rpc, plan, open_store) if plan.dp_rank == 0 else None
        try:
            self._rpc.run(self._join())
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise UnavailableError(
                    f"not all {plan.dp_size} ranks of the group have come within {plan.join_seconds:g} s"
                ) from error
            raise

    # In the engine's thread.

    def new_step(self) -> None:
        """Count a forward pass that starts now, and announce it unless the group goes so far already.

        Raises WorkerLostError if the coordinator does not answer.
        """
        if (step := self.steps.new_step()) is None:
            return
        # The same number follows through the input. Until then, a busy rank would announce every further step.
        if self._shared is not None:
            self.counts["sent start_step"] += self._shared.advance(step)
            self.read_steps()
            return
        answer: pb.GroupStep = self._call("start_step", lambda stub: stub.StartStep(pb.GroupStep(step=step)))
        check_numbers(answer)
        self.steps.start_step(answer.step)

    def leave(self) -> None:
        """Announce that this rank starts no step of its own any more; ``is_over`` follows once all ranks have done so."""
        plan = self.plan
        part = pb.Part(dp_rank=plan.dp_rank, dp_size=plan.dp_size)
        self._call("leave", lambda stub: stub.Leave(part))

    def read_steps(self) -> None:
        """Read what others have announced in shared memory, which may not have come through the input yet."""
        if self._shared is not None:
            self.steps.start_step(self._shared.step)

    def close(self) -> None:
        """End the thread and its connections. Before ``is_over``, the rest of the group ends itself then."""
        self._rpc.close()

    def _call(self, name: str, call: Callable[[Any], Awaitable[_T]]) -> _T:
        self.counts[f"sent {name}"] += 1

        async def wait() -> _T:
            return await asyncio.wait_for(call(self._rpc.coordinator), self.plan.timeout_seconds)

        try:
            return self._rpc.run(wait())
        except (grpc.aio.AioRpcError, TimeoutError, ThreadCancelledError) as error:
            raise WorkerLostError(f"the group's coordinator does not answer {name}: {error!r}") from error

    # In the member's thread.

    async def _join(self) -> None:
        plan = self.plan
        async with asyncio.timeout(plan.join_seconds):
            channel = self._rpc.channel(plan.address)
            self._rpc.coordinator = group_pb2_grpc.CoordinatorStub(channel)
            watched = asyncio.Event()
            servicers: list[Callable[[grpc.aio.Server], None]] = [
                partial(group_pb2_grpc.add_ParticipantServicer_to_server, _Participant(self, watched))
            ]
            port = 0
            if self._coordinator is not None:
                port = split_address(plan.address)[1]
                servicers.append(partial(group_pb2_grpc.add_CoordinatorServicer_to_server, self._coordinator))
            bound = split_address(await self._rpc.serve(join_address(plan.listen_host, port), servicers))
            part = pb.Part(dp_rank=plan.dp_rank, dp_size=plan.dp_size, host=plan.host, port=bound[1])
            if plan.shares_memory:
                part.machine = machine_identity()
            group = await self._register(part)
            self.store_address = join_address(split_address(plan.address)[0], group.store_port)
            if group.memory:
                self._share_steps(Path(group.memory))
            await watched.wait()

    def _share_steps(self, folder: Path) -> None:
        """Announce steps in shared memory from now on."""
        plan = self.plan
        try:
            shared = SharedSteps(folder, plan.dp_rank, plan.dp_size, plan.look_ahead)
        except OSError as error:
            raise UnavailableError(f"the group's memory in {folder} cannot be opened: {error}") from error

        def on_bell() -> None:
            shared.clear_bell()
            self.put(partial(self.steps.start_step, shared.step))

        self._shared = shared
        self._rpc.read(shared.fileno(), on_bell, shared.close)
        on_bell()  # what others have announced before this rank had a bell

    async def _register(self, part: pb.Part) -> pb.Group:
        while True:
            try:
                group: pb.Group = await self._rpc.coordinator.RegPart(part)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise SettingError(
                        f"the group refuses this rank: {error.details()}", param="data_parallel_rank"
                    ) from error
                await asyncio.sleep(_RETRY_SECONDS)  # rank 0 may start later
            else:
                check_numbers(group)
                return group

    def count_received(self, name: str) -> None:
        """Count a call that was received."""
        self.counts[f"received {name}"] += 1

    def on_end(self) -> None:
        """Note that all ranks have left, and wake the engine's thread."""
        self.is_over = True
        self.put(lambda: None)

    def fail(self, reason: str) -> None:
        """End the process, unless the group has ended as a whole."""
        if not (self.is_over or self._rpc.is_closing):
            self._die(reason)


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Start the thread of this process in which the members' calls are made and answered; return its event loop."""
    # One for all, and never closed: gRPC loses calls of other loops when an event comes for one that is closed.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="data-parallel", daemon=True).start()
    return loop


class _Rpc:
    """One server, and channels to other ranks."""

    def __init__(self, plan: GroupPlan) -> None:
        self.is_closing = False
        self._plan = plan
        self._tls = ClusterTls(plan.secret, Party.WORKERS, Party.WORKERS, _GROUP_NAME)
        self._loop = _event_loop()
        self._server: grpc.aio.Server | None = None
        self._channels: list[grpc.aio.Channel] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: set[asyncio.Task[None]] = set()
        self.owned = ExitStack()
        """Closed last."""
        self.coordinator: Any = None

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the thread, from another one; return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def channel(self, address: str) -> grpc.aio.Channel:
        """Open a channel to another rank, or to this one."""
        channel = self._tls.channel(address, _GROUP_NAME, internal_stream_options(self._plan.timeout_seconds))
        self._channels.append(channel)
        return channel

    async def serve(self, address: str, servicers: list[Callable[[grpc.aio.Server], None]]) -> str:
        """Start the server; return its address. Raises SettingError if it cannot be bound."""
        self._server = grpc.aio.server(options=internal_server_options(self._plan.timeout_seconds))
        for add in servicers:
            add(self._server)
        return await start_grpc(
            self._server, address, param="data_parallel_address", credentials=self._tls.server_credentials
        )

    def start(self, work: Coroutine[Any, Any, None], *, until_closed: bool = False) -> None:
        """Run a coroutine in the background; from a coroutine of this thread. until_closed: it ends with the channels."""
        task = asyncio.create_task(work)
        tasks = self._watches if until_closed else self._tasks
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def read(self, descriptor: int, on_readable: Callable[[], None], close: Callable[[], None]) -> None:
        """Call a function whenever a descriptor can be read, until this ends and closes it."""
        self.owned.callback(close)
        self._loop.add_reader(descriptor, on_readable)
        self.owned.callback(self._loop.remove_reader, descriptor)

    def close(self) -> None:
        """End everything. May be called twice."""
        if self.is_closing:
            return
        self.is_closing = True
        self.run(self._close())

    async def _close(self) -> None:
        # Calls to the other ranks first: a rank that did not get the end would take that of this process for a death.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()
        await asyncio.gather(*self._watches, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(_STOP_GRACE_SECONDS)
        self.owned.close()


class _Participant(group_pb2_grpc.ParticipantServicer):
    """The calls of the coordinator at a rank."""

    def __init__(self, member: Member, watched: asyncio.Event) -> None:
        self._member = member
        self._watched = watched

    async def StartStep(self, message: pb.GroupStep, _context: Any) -> pb.GroupAccepted:  # noqa: N802
        """Take part in all steps up to this one."""
        check_numbers(message)
        self._member.count_received("start_step")
        # Through the input of the engine, which belongs to another thread, and may wait there.
        self._member.put(partial(self._member.steps.start_step, message.step))
        return _OK

    async def End(self, _message: pb.GroupAccepted, _context: Any) -> pb.GroupAccepted:  # noqa: N802
        """End once all steps are made."""
        self._member.on_end()
        return _OK

    async def Watch(self, _message: pb.GroupAccepted, _context: Any) -> AsyncIterator[pb.GroupAccepted]:  # noqa: N802
        """Keep the call open; end the process if the coordinator's end of it is gone."""
        yield _OK
        self._watched.set()
        try:
            await asyncio.Future[None]()
        finally:
            self._member.fail("the coordinator of the group is gone")


class _Coordinator(group_pb2_grpc.CoordinatorServicer):
    """The coordinator's calls. Any exception in what follows from one ends the process, or a rank would wait for ever."""

    def __init__(self, member: Member, rpc: _Rpc, plan: GroupPlan, open_store: OpenStore) -> None:
        self._member = member
        self._rpc = rpc
        self._plan = plan
        self._steps = CoordinatorSteps(plan.dp_size, plan.look_ahead)
        self._group = pb.Group(store_port=open_store())
        self._are_registered = asyncio.Event()
        self._parts: dict[int, Any] = {}

    async def RegPart(self, message: pb.Part, context: Any) -> pb.Group:  # noqa: N802
        """Register a rank; watch all, and answer, once they are complete."""
        try:
            check_numbers(message)
            info = PartInfo(message.dp_rank, message.host, message.port, message.machine)
            self._steps.reg_part(info, message.dp_size)
        except KvbatonError as error:
            await abort(context, error)
        if self._steps.is_complete:
            for info in self._steps.parts.values():
                channel = self._rpc.channel(join_address(info.host, info.port))
                self._parts[info.dp_rank] = group_pb2_grpc.ParticipantStub(channel)
                self._start(self._watch(info), until_closed=True)
            if self._steps.is_on_one_machine:
                self._create_memory()
            self._are_registered.set()
        await self._are_registered.wait()
        return self._group

    def _create_memory(self) -> None:
        try:
            folder = RunFolder("group")
            self._rpc.owned.callback(folder.close)
            create_steps(folder.path, self._plan.dp_size)
        except OSError as error:
            logger.warning(
                "the ranks of the group call each other, since they cannot share memory: %s", error
            )
        else:
            self._group.memory = str(folder.path)

    async def StartStep(self, message: pb.GroupStep, _context: Any) -> pb.GroupStep:  # noqa: N802
        """Advance to a step, and announce it to all ranks in the background: the caller continues at once."""
        check_numbers(message)
        self._member.count_received("start_step of a rank")
        if self._steps.advance(message.step):
            step = pb.GroupStep(step=self._steps.step)
            self._start(self._announce("start_step", lambda part: part.StartStep(step)))
        return pb.GroupStep(step=self._steps.step)

    async def Leave(self, message: pb.Part, _context: Any) -> pb.GroupAccepted:  # noqa: N802
        """Note that a rank has left; end the group when all have."""
        check_numbers(message)
        self._steps.leave(message.dp_rank)
        if self._steps.is_over:
            self._start(self._announce("end", lambda part: part.End(_OK)))
        return _OK

    async def _announce(self, name: str, call: Callable[[Any], Awaitable[Any]]) -> None:
        self._member.counts[f"sent {name} to all"] += len(self._parts)
        async with asyncio.timeout(self._plan.timeout_seconds):
            await asyncio.gather(*map(call, self._parts.values()))

    async def _watch(self, info: PartInfo) -> None:
        with suppress(grpc.aio.AioRpcError):
            async for _ in self._parts[info.dp_rank].Watch(_OK, wait_for_ready=True):
                pass
        self._member.fail(f"rank {info.dp_rank} of the group is gone")

    def _start(self, work: Coroutine[Any, Any, None], *, until_closed: bool = False) -> None:
        async def run_guarded() -> None:
            try:
                await work
            except Exception as error:
                logger.exception("the coordinator of the group failed")
                self._member.fail(f"the coordinator of the group failed: {error!r}")

        self._rpc.start(run_guarded(), until_closed=until_closed)
