"""A router that must stop lets running answers end, and ends the others with one clear error each."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from protos import inference_pb2 as pb
from protos import worker_pb2
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.router.test_admission_queue import grant_one
from tests.router.test_ends import CHAT, TEXT, TOKENS, nothing_is_left

STALLED = Script(tokens=TOKENS, stall_at=2)
STOPPED = "the router stopped before the answer was complete"


async def streaming(cluster: Cluster, count: int = 1) -> None:
    await cluster.until(lambda state: state["requests"]["streaming"] == count)


async def events_of(cluster: Cluster, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream, also of one that ends with an error and without [DONE]."""
    async with cluster.session.post(cluster.url(path), json={**body, "stream": True}) as response:
        text = await response.text()
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_running_answers_end_and_new_requests_are_refused_meanwhile() -> None:
    """P10: running answers are unaffected; new requests are rejected with Retry-After, and their connections closed."""
    is_held = True

    def script(_: Any) -> Script:
        return STALLED if is_held else Script(tokens=TOKENS)

    async with running_cluster(script, drain_seconds=20) as cluster:
        await grant_one(cluster, "decode-0")
        running = asyncio.create_task(events_of(cluster, TEXT, {"prompt": "x"}))
        await streaming(cluster)
        waiting = asyncio.create_task(cluster.post(TEXT, {"prompt": "x"}))
        await cluster.until(lambda state: state["num_in_line"] == 1)
        at_once = asyncio.Event()
        draining = asyncio.create_task(cluster.service.drain(at_once))
        await asyncio.sleep(0)
        async with cluster.session.post(cluster.url(TEXT), json={"prompt": "x"}) as response:
            assert (response.status, response.headers["Connection"]) == (503, "close")
            assert response.headers["Retry-After"]
            assert "the router is stopping" in (await response.json())["error"]["message"]
        assert (await cluster.get("/ready"))[0] == 503
        assert (await cluster.get("/health"))[0] == 200
        is_held = False
        decode = cluster.workers["decode-0"]
        task = decode.received.decodes[0].task

        decode.stream.send(
            worker_pb2.TokenEntry(
                request_id=task.request_id, first_index=2, token_ids=TOKENS[2:], finish_reason="stop"
            )
        )
        assert (await running)[-1] == "[DONE]"
        assert (await waiting)[0] == 200, "it was admitted before"
        await draining
        await nothing_is_left(cluster)


async def ended(cluster: Cluster, asking: Awaitable[Any], count: int) -> Any:
    await streaming(cluster, count)
    await cluster.service.drain(asyncio.Event())
    return await asking


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_a_stream_that_is_not_done_at_the_deadline_ends_with_an_error_event(path: str) -> None:
    """P10: its last event is the error, and there is no [DONE]."""
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    async with running_cluster(STALLED, drain_seconds=0.2) as cluster:
        events = await ended(cluster, asyncio.create_task(events_of(cluster, path, body)), 1)
        assert len(events) > 1
        assert STOPPED in events[-1]["error"]["message"]
        assert events[-1]["error"]["code"] == "unavailable"
        await nothing_is_left(cluster)


async def test_whole_answers_and_embeddings_get_a_status() -> None:
    """P10: 503 with Retry-After, not a broken connection."""

    def script(task: Any) -> Script:
        return Script(tokens=TOKENS, stall_at=2 if task.HasField("sampling") else 0)

    async with running_cluster(script, drain_seconds=0.2) as cluster:
        asking = asyncio.gather(
            cluster.post(TEXT, {"prompt": "x"}),
            cluster.post(TEXT, {"prompt": ["x", "y"], "n": 2}),
            cluster.post("/v1/embeddings", {"input": "x"}),
        )
        await streaming(cluster, 5)
        await cluster.until(lambda state: state["requests"]["waiting_for_first_token"] == 1)
        await cluster.service.drain(asyncio.Event())
        for status, answer in await asking:
            assert status == 503
            assert STOPPED in answer["error"]["message"]


async def test_answers_that_the_router_ends_are_not_counted_as_cancelled_by_their_clients() -> None:
    """B9: streams, whole answers with several choices, and gRPC; a client that leaves before is still counted as one."""
    async with running_cluster(STALLED, drain_seconds=0.2) as cluster, cluster.channel() as channel:
        left = asyncio.create_task(cluster.post(TEXT, {"prompt": "x"}))
        await streaming(cluster)
        left.cancel()
        await cluster.until(lambda state: state["requests"]["streaming"] == 0)
        asking = [
            asyncio.create_task(cluster.post(TEXT, {"prompt": "x", "n": 2})),
            asyncio.create_task(events_of(cluster, TEXT, {"prompt": "x"})),
        ]
        call = cluster.inference(channel).Generate(pb.GenerateRequest(text="x"))
        reading = asyncio.create_task(call.read())
        await streaming(cluster, 4)
        await cluster.service.drain(asyncio.Event())
        await asyncio.wait([*asking, reading])
        metrics = await cluster.metrics()
        assert metrics['kvbaton_request_errors_total{kind="stopped"}'] == 4
        assert metrics['kvbaton_request_errors_total{kind="cancelled"}'] == 1


async def test_grpc_calls_end_as_unavailable() -> None:
    """P10: streams and whole answers."""
    async with running_cluster(STALLED, drain_seconds=0.2) as cluster, cluster.channel() as channel:
        stub = cluster.inference(channel)

        async def stream() -> grpc.StatusCode:
            try:
                async for _ in stub.Generate(pb.GenerateRequest(text="x")):
                    pass
            except grpc.aio.AioRpcError as error:
                code: Any = error.code()
                return grpc.StatusCode(code)
            return grpc.StatusCode.OK

        async def whole() -> grpc.StatusCode:
            with suppress(grpc.aio.AioRpcError):
                call = stub.GenerateOnce(pb.GenerateRequest(text="x"))
                await call
            ended: Any = await call.code()
            return grpc.StatusCode(ended)

        asking = asyncio.gather(stream(), whole())
        assert await ended(cluster, asking, 2) == [grpc.StatusCode.UNAVAILABLE] * 2


async def test_a_second_signal_ends_the_drain_at_once() -> None:
    """P10: and a router that has nothing to do does not wait at all."""
    async with running_cluster(STALLED, drain_seconds=600) as cluster:
        asking = asyncio.create_task(cluster.post(TEXT, {"prompt": "x"}))
        await streaming(cluster)
        at_once = asyncio.Event()
        draining = asyncio.create_task(cluster.service.drain(at_once))
        await cluster.until(lambda state: not state["is_ready"])
        at_once.set()
        async with asyncio.timeout(10):
            await draining
            assert (await asking)[0] == 503
    async with running_cluster(STALLED, drain_seconds=600) as cluster:
        async with asyncio.timeout(10):
            await cluster.service.drain(asyncio.Event())


async def begun_upload(cluster: Cluster, rest: asyncio.Event) -> aiohttp.ClientResponse:
    """An upload whose end is sent when ``rest`` is set."""
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head += b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}'

    async def body() -> AsyncIterator[bytes]:
        yield head
        await rest.wait()
        yield b"\r\n--b--\r\n"

    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    return await cluster.session.post(cluster.url("/v1/files"), data=body(), headers=headers)


async def until_data(folder: Path) -> None:
    """Block until an upload has begun."""
    async with asyncio.timeout(10):
        while not list(folder.glob("*.data")):
            await asyncio.sleep(0.01)


async def test_an_upload_ends_before_the_router_does(tmp_path: Path) -> None:
    """P10: the drain also waits for requests that ask for no tokens."""
    async with running_cluster(STALLED, (), files_dir=tmp_path, drain_seconds=20) as cluster:
        rest = asyncio.Event()
        uploading = asyncio.create_task(begun_upload(cluster, rest))
        await until_data(tmp_path)
        draining = asyncio.create_task(cluster.service.drain(asyncio.Event()))
        await cluster.until(lambda state: not state["is_ready"])
        rest.set()
        assert (await uploading).status == 200
        await draining


async def test_an_upload_and_a_body_that_do_not_end_get_a_status(tmp_path: Path) -> None:
    """P10: their connections were closed without a word."""
    async with running_cluster(STALLED, (), files_dir=tmp_path, drain_seconds=0.2) as cluster:
        uploading = asyncio.create_task(begun_upload(cluster, asyncio.Event()))
        await until_data(tmp_path)
        host, _, port = cluster.service.addresses.http.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b'Content-Length: 99\r\n\r\n{"prompt": '
        )
        writer.write(b'"x')
        async with asyncio.timeout(10):
            await cluster.until(lambda state: state["num_http_requests"] == 2)
            await cluster.service.drain(asyncio.Event())
            answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503")
        response = await uploading
        assert (response.status, STOPPED in await response.text()) == (503, True)
        assert not list(tmp_path.glob("*.data"))
        writer.close()
