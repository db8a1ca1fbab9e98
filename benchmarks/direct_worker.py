"""One aggregated worker without a router: it registers at the benchmark, which sends it requests."""

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.servers import in_time, started
from benchmarks.settings import service_environment
from contract.membership import Registration
from protos import WORKER_PROTOCOL_MAX, worker_pb2_grpc
from protos import worker_pb2 as pb
from serving.cluster_tls import router_tls
from serving.grpc_options import internal_server_options
from wire.messages import from_proto

_PEER_SECONDS = 10.0
_SESSION = "benchmark"


class DirectWorker(worker_pb2_grpc.MembershipServicer):
    """The minimal router for one worker, which receives its tokens."""

    def __init__(self) -> None:
        self.attached: asyncio.Future[Registration] = asyncio.get_running_loop().create_future()
        self._orders: asyncio.Queue[pb.RouterMessage | None] = asyncio.Queue()
        self._heard: asyncio.Queue[tuple[float, pb.TokenEntry]] = asyncio.Queue()
        self._numbers = count()

    async def Attach(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any
    ) -> AsyncIterator[pb.RouterMessage]:
        """Implement MembershipServicer of ``router.ports.membership``."""
        first = await anext(request_iterator)
        welcome = pb.Welcome(protocol=WORKER_PROTOCOL_MAX, router_id="benchmark", session=_SESSION)
        yield pb.RouterMessage(welcome=welcome)
        self.attached.set_result(from_proto(Registration, first.registration))
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            while message := await self._orders.get():
                yield message
        finally:
            reading.cancel()

    async def _read(self, messages: AsyncIterator[pb.WorkerMessage]) -> None:
        async for message in messages:
            now = time.perf_counter()
            for entry in message.step.entries:
                self._heard.put_nowait((now, entry))
        self._orders.put_nowait(None)

    async def waits_for_first_token(self, prompt: list[int]) -> float:
        """Return the seconds to the first token, minus the worker's computation of the prompt."""
        sampling = pb.EngineSampling(top_p=1.0, max_tokens=2, ignore_eos=True)
        task = pb.Task(
            request_id=f"r{next(self._numbers)}",
            prompt_token_ids=prompt,
            sampling=sampling,
            deadline_seconds=60.0,
        )
        begin = time.perf_counter()
        order = pb.Order(decode=pb.DecodeRequest(task=task))
        self._orders.put_nowait(pb.RouterMessage(orders=pb.Orders(orders=[order])))
        end, first = await self._heard.get()
        entry = first
        while not entry.finish_reason:
            _, entry = await self._heard.get()
        return end - begin - first.timings.prefill_seconds


@asynccontextmanager
async def direct_worker(
    folder: Path, model: Path, *arguments: str, time_limit: float
) -> AsyncIterator[DirectWorker]:
    """Run ``kvbaton both`` with these arguments, attached to this process. Raises ServerError."""
    secret = secrets.token_hex(16)
    file = folder / "secret"
    log = folder / "direct_worker.log"
    file.touch(mode=0o600)
    file.write_text(secret)
    file.chmod(0o600)
    worker = DirectWorker()
    tls = router_tls(secret)
    server = grpc.aio.server(options=internal_server_options(_PEER_SECONDS))
    worker_pb2_grpc.add_MembershipServicer_to_server(worker, server)
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials)
    await server.start()
    command = [sys.executable, "-m", "cli.main", "both", "--router", f"127.0.0.1:{port}"]
    command += ["--secret-file", str(file), "--model", str(model), *arguments]
    try:
        async with started(command, service_environment(), log) as process:
            async with in_time(process, log, time_limit):
                await _registration(worker, process)
            yield worker
    finally:
        await server.stop(None)


async def _registration(worker: DirectWorker, process: asyncio.subprocess.Process) -> Registration:
    """Wait for the worker's registration. Raises ChildProcessError if the worker ends before."""
    ended = asyncio.create_task(process.wait())
    ended.add_done_callback(lambda _: worker.attached.cancel())
    try:
        return await worker.attached
    except asyncio.CancelledError:
        if process.returncode is None:
            raise
        raise ChildProcessError from None
    finally:
        ended.cancel()
