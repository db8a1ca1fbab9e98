"""A real router with scripted workers, on ports of its own, for one test."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc.aio

from contract.identity import Role
from protos import inference_pb2_grpc
from router.service import RouterService
from router.settings import RouterSettings
from tests.fakes.router.script import Script, Writer
from tests.fakes.router.worker import ScriptedWorker
from tests.text.tiny_model import model_files

SECRET = "the cluster's secret, of 32 or more characters"
MODEL = "tiny"
PAIR = (Role.PREFILL, Role.DECODE)


@dataclass
class Cluster:
    """A router and its workers by id. script: for every worker that has no other one."""

    service: RouterService
    session: aiohttp.ClientSession
    script: Writer
    stack: AsyncExitStack
    workers: dict[str, ScriptedWorker] = field(default_factory=dict)

    async def add(self, role: Role, name: str | None = None, /, **registration: Any) -> ScriptedWorker:
        """Attach one more worker; ``registration`` overrides fields of its registration."""
        worker = ScriptedWorker(
            role,
            self.service.addresses.internal,
            SECRET,
            lambda task: self.script(task),
            worker_id=name,
            model_files=model_files(),
            registration={"model_name": MODEL, "max_model_len": 128, "vocab_size": 300, **registration},
        )
        await self.stack.enter_async_context(worker)
        self.workers[worker.worker_id] = worker
        # In a storm it may die before it is seen.
        await self.until(lambda state: worker.is_dead or _has_credit(state, worker.worker_id))
        return worker

    def url(self, path: str) -> str:
        """Return the URL of a path on the public port."""
        return f"http://{self.service.addresses.http}{path}"

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
        """POST JSON; return status and body."""
        async with self.session.post(self.url(path), json=body, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        """GET; return status and body."""
        async with self.session.get(self.url(path)) as response:
            return response.status, await response.json()

    async def stream(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """POST with ``stream``; return the events' objects, and "[DONE]" unchanged."""
        async with self.session.post(self.url(path), json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            text = await response.text()
        assert text.endswith("\n\n")
        blocks = [block for block in text.removesuffix("\n\n").split("\n\n") if not block.startswith(":")]
        events = [event.removeprefix("data: ") for event in blocks]
        return [event if event == "[DONE]" else json.loads(event) for event in events]

    def inference(self, channel: grpc.aio.Channel) -> Any:
        """Return a stub of the public gRPC API."""
        return inference_pb2_grpc.InferenceStub(channel)

    def channel(self) -> grpc.aio.Channel:
        """Return a channel to the public gRPC port."""
        return grpc.aio.insecure_channel(self.service.addresses.grpc)

    async def debug_state(self) -> dict[str, Any]:
        """Return the admin port's /debug/state."""
        async with self.session.get(f"http://{self.service.addresses.admin}/debug/state") as response:
            return dict(await response.json())

    async def until(self, is_true: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Block until the condition holds for the debug state, and return the state."""
        async with asyncio.timeout(60):
            while not is_true(state := await self.debug_state()):
                await asyncio.sleep(0.01)
        return state

    async def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics on the admin port, by their names with labels."""
        async with self.session.get(f"http://{self.service.addresses.admin}/metrics") as response:
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            lines = (await response.text()).splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
        }


def _has_credit(state: dict[str, Any], worker_id: str) -> bool:
    return any(w["worker_id"] == worker_id and w["max_requests"] for w in state["workers"])


@asynccontextmanager
async def running_cluster(
    script: Script | Writer, roles: tuple[Role, ...] = PAIR, **settings: Any
) -> AsyncIterator[Cluster]:
    """Run a router with workers; yield it when it is ready (if it has any), and stop it at the end.

    settings: of the router, and ``clock``, which returns Unix seconds.
    """
    clock = settings.pop("clock", time.time)
    writer = script if not isinstance(script, Script) else (lambda _: script)
    addresses = dict.fromkeys(("http", "grpc", "internal", "admin"), "127.0.0.1:0")
    given = {"worker_wait_seconds": 0, "secret": SECRET, **addresses, **settings}
    service = RouterService(RouterSettings(**given), clock)
    await service.start()
    try:
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            cluster = Cluster(service, session, writer, stack)
            for role in roles:
                await cluster.add(role)
            if roles:
                async with asyncio.timeout(20):
                    await service.wait_ready()
            yield cluster
    finally:
        await service.stop()
