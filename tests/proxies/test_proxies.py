"""Streams, uploads and calls through real reverse proxies, configured by the files of ``examples/``."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest

from contract.identity import Role
from protos import inference_pb2 as pb
from protos import worker_pb2
from router.migration.migration import MigrationState
from tests.fakes.router.script import Script
from tests.proxies.proxies import NAME, Proxy, RunProxy, caddy, nginx
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.moves import SOURCE, TARGET, Moves, stalling
from tests.router.test_ends import TEXT, TOKENS
from tests.router.test_keep_alive import Reading
from tests.router.test_replay import ANSWER, add_twins, at_first

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

PROXIES = [nginx, caddy]
IDLE = 5
"""Seconds of nginx's limit in the tests with long silences."""
KEPT: dict[str, Any] = {"allowed_hosts": NAME, "stream_keep_alive_seconds": 2}
SILENCE = IDLE + 3


@asynccontextmanager
async def reading(proxy: Proxy) -> AsyncIterator[Reading]:
    body = {"prompt": "x", "stream": True}
    async with proxy.session.post(proxy.url(TEXT), json=body) as response:
        assert response.status == 200, await response.text()
        yield Reading(response)


async def silent(stream: Reading) -> None:
    """Read for longer than nginx would wait for a byte."""
    for _ in range(SILENCE // 4):
        await stream.until_silent()


def slow_prefill(seconds: float) -> Any:
    """Return a script whose prefill legs take so long."""
    return lambda task: Script(tokens=TOKENS, token_delay_seconds=0 if task.first_index else seconds)


async def test_without_comments_the_limit_ends_a_long_prefill(tmp_path: Path) -> None:
    settings = {**KEPT, "stream_keep_alive_seconds": 0}
    async with (
        running_cluster(slow_prefill(20), PAIR, **settings) as cluster,
        nginx(tmp_path, cluster.service.addresses, IDLE) as proxy,
        proxy.session.post(proxy.url(TEXT), json={"prompt": "x", "stream": True}) as response,
    ):
        assert response.status == 504


async def test_a_prefill_of_20_seconds_passes_a_limit_of_5(tmp_path: Path) -> None:
    async with (
        running_cluster(slow_prefill(20), PAIR, **KEPT) as cluster,
        nginx(tmp_path, cluster.service.addresses, IDLE) as proxy,
        reading(proxy) as stream,
    ):
        await stream.is_whole()
        assert stream.num_silences >= 4


async def test_a_replay_passes_it(tmp_path: Path) -> None:
    async with (
        running_cluster(at_first(stall_at=3), PAIR, **KEPT) as cluster,
        nginx(tmp_path, cluster.service.addresses, IDLE) as proxy,
        reading(proxy) as stream,
    ):
        await silent(stream)
        await add_twins(cluster, Role.DECODE)
        await cluster.workers["decode-0"].die()
        await stream.is_whole()


async def test_a_migration_passes_it(tmp_path: Path) -> None:
    async with (
        running_cluster(stalling(), PAIR, **KEPT, max_replays=0) as cluster,
        nginx(tmp_path, cluster.service.addresses, IDLE) as proxy,
    ):
        made = Moves(cluster)
        async with reading(proxy) as stream:
            await stream.until_silent()
            await cluster.add(Role.DECODE, TARGET)
            made.source.player.may_hand_off.clear()
            (run,) = made.runs
            moving = asyncio.create_task(made.migrator.move(run, made.attached(SOURCE)))
            await made.source.received.wait_for(lambda each: len(each.hand_offs) == 1)
            await silent(stream)
            made.source.player.may_hand_off.set()
            assert await moving is MigrationState.MOVED
            await stream.is_whole("abcdefghijklmnop")


async def test_a_grpc_call_passes_it(tmp_path: Path) -> None:
    """Only HTTP/2 pings end its silence."""
    async with (
        running_cluster(slow_prefill(SILENCE), PAIR, **KEPT) as cluster,
        nginx(tmp_path, cluster.service.addresses, IDLE) as proxy,
    ):
        assert await generated(cluster, proxy) == ANSWER


@pytest.mark.parametrize("run", PROXIES)
async def test_the_example_passes_streams_as_they_come(run: RunProxy, tmp_path: Path) -> None:
    """The first token arrives while the second one is awaited."""

    def script(task: worker_pb2.Task) -> Script:
        return Script(tokens=TOKENS, stall_at=None if task.attempt else 1)

    async with (
        running_cluster(script, PAIR, allowed_hosts=NAME) as cluster,
        run(tmp_path, cluster.service.addresses) as proxy,
        reading(proxy) as stream,
    ):
        async with asyncio.timeout(20):
            while not stream.events:
                assert await stream.read_line(), "the stream ended"
        await add_twins(cluster, Role.DECODE)
        await cluster.workers["decode-0"].die()
        await stream.is_whole()


@pytest.mark.parametrize("run", PROXIES)
async def test_the_example_passes_uploads_and_grpc_calls(run: RunProxy, tmp_path: Path) -> None:
    data = b'{"custom_id": "x"}\n' * 700_000  # 13 MB: more than nginx allows by itself
    async with (
        running_cluster(
            Script(tokens=TOKENS), PAIR, allowed_hosts=NAME, files_dir=tmp_path / "files"
        ) as cluster,
        run(tmp_path, cluster.service.addresses) as proxy,
    ):
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", io.BytesIO(data), filename="batch.jsonl")
        async with proxy.session.post(proxy.url("/v1/files"), data=form) as response:
            assert response.status == 200, await response.text()
            assert (await response.json())["bytes"] == len(data)
        assert await generated(cluster, proxy) == ANSWER


async def generated(cluster: Cluster, proxy: Proxy) -> str:
    """Return the text of a gRPC call through the proxy."""
    options = [("grpc.default_authority", NAME)]
    async with grpc.aio.insecure_channel(proxy.grpc, options) as channel:
        call = cluster.inference(channel).Generate(pb.GenerateRequest(text="x"))
        return "".join([choice.text async for message in call for choice in message.choices])
