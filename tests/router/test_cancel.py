"""A request is cancelled by the id that the router made, or by the name that the client gave; only by its owner."""

import asyncio
from typing import Any

import grpc
import pytest

from contract.errors import CancelledError
from contract.identity import Role
from protos import inference_pb2 as pb
from router.grpc.servicer import REQUEST_ID_KEY
from router.intake.cancellation import CancellableRequests, client_name
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.text.tiny_model import END, word_id

HELLO = Script(tokens=[word_id("hello"), word_id(" world"), END])
STUCK = Script(tokens=HELLO.tokens, stall_at=1)
ASKED = pb.GenerateRequest(text="x")


async def cancel(cluster: Cluster, name: str, **options: Any) -> int:
    async with cluster.channel() as channel:
        request = pb.CancelGenerationRequest(request_id=name)
        answer = await cluster.inference(channel).Cancel(request, **options)
        return int(answer.num_cancelled)


async def all_cancelled(cluster: Cluster, count: int = 1) -> None:
    async with asyncio.timeout(20):
        for worker in cluster.workers.values():
            await worker.received.wait_for(lambda each: len(each.cancels) == count)


async def test_a_stream_is_cancelled_by_the_id_in_its_initial_metadata() -> None:
    async with running_cluster(STUCK) as cluster, cluster.channel() as channel:
        call = cluster.inference(channel).Generate(ASKED)
        request_id = dict(await call.initial_metadata())[REQUEST_ID_KEY]
        first = await call.read()
        assert first.request_id == request_id
        assert await cancel(cluster, request_id) == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.CANCELLED
        assert "by its client" in (caught.value.details() or "")
        await all_cancelled(cluster)
        assert await cancel(cluster, request_id) == 0
        await cluster.until(lambda state: not any(state["requests"].values()))


async def test_the_id_is_known_before_the_first_token() -> None:
    async with (
        running_cluster(Script(tokens=HELLO.tokens, stall_at=0)) as cluster,
        cluster.channel() as channel,
    ):
        call = cluster.inference(channel).Generate(ASKED)
        request_id = dict(await call.initial_metadata())[REQUEST_ID_KEY]
        async with asyncio.timeout(20):
            for worker in cluster.workers.values():
                await worker.received.wait_for(lambda each: bool(each.prefills or each.decodes))
        assert await cancel(cluster, request_id) == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("by_metadata", [False, True])
async def test_all_requests_of_a_name_are_cancelled(by_metadata: bool) -> None:
    async with running_cluster(STUCK) as cluster, cluster.channel() as channel:
        stub = cluster.inference(channel)
        request = pb.GenerateRequest(text="x", request_id="" if by_metadata else "mine")
        metadata = (("x-request-id", "mine"),) if by_metadata else ()
        calls = [stub.Generate(request, metadata=metadata) for _ in range(2)]
        other = stub.Generate(pb.GenerateRequest(text="x", request_id="yours"))
        for call in (*calls, other):
            await call.read()
        assert await cancel(cluster, "nobody") == 0
        assert await cancel(cluster, "mine") == 2
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() == grpc.StatusCode.CANCELLED
        assert not other.done()
        other.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_http_request_is_cancelled_too(stream: bool) -> None:
    async with running_cluster(STUCK) as cluster:
        body = {"prompt": "x", "stream": stream}
        url = cluster.url("/v1/completions")
        headers = {"X-Request-Id": "page-7"}
        asking = asyncio.ensure_future(cluster.session.post(url, json=body, headers=headers).__aenter__())
        await cluster.until(lambda state: state["requests"]["streaming"] == 1)
        assert await cancel(cluster, "page-7") == 1
        response = await asking
        text = await response.text()
        assert response.status == (200 if stream else 499)
        assert response.headers["X-Request-Id"] == "page-7"
        assert "cancelled by its client" in text
        assert "[DONE]" not in text
        response.release()
        await all_cancelled(cluster)


async def test_others_cannot_cancel_it() -> None:
    keys = {name: (("authorization", f"Bearer {name}"),) for name in ("alice", "bob")}
    async with running_cluster(STUCK, api_keys="alice,bob") as cluster, cluster.channel() as channel:
        request = pb.GenerateRequest(text="x", request_id="1")
        call = cluster.inference(channel).Generate(request, metadata=keys["alice"])
        await call.read()
        request_id = dict(await call.initial_metadata())[REQUEST_ID_KEY]
        for name in ("1", request_id):
            assert await cancel(cluster, name, metadata=keys["bob"]) == 0
        assert await cancel(cluster, "1", metadata=(("authorization", "bearer  alice"),)) == 1


async def test_cancel_needs_an_id() -> None:
    async with running_cluster(HELLO, ()) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cancel(cluster, "")
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("name", ["a" * 65, "a b", "\x7f", "ü"])
async def test_an_invalid_name_is_rejected_or_ignored(name: str) -> None:
    assert client_name(name) is None
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster, cluster.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.inference(channel).GenerateOnce(pb.GenerateRequest(text="x", request_id=name))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "request_id must be" in (caught.value.details() or "")


async def test_the_headers_name_every_answer() -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}, {"prompt": 7}):
            for given in (None, "mine", "a" * 65):
                headers = {"X-Request-Id": given} if given else {}
                url = cluster.url("/v1/completions")
                async with cluster.session.post(url, json=body, headers=headers) as response:
                    request_id = response.headers["x-kvbaton-request-id"]
                    assert request_id.startswith("cmpl-")
                    wanted = "mine" if given == "mine" else request_id
                    assert response.headers["X-Request-Id"] == wanted


async def test_a_scope_that_ends_by_itself_is_not_cancelled() -> None:
    running = CancellableRequests()
    with running.open("", "one", None):
        pass
    assert running.cancel("", "one") == 0
    with pytest.raises(TimeoutError), running.open("", "one"):
        raise TimeoutError
    with pytest.raises(CancelledError), running.open("", "one", "two"):
        assert (running.cancel("", "one"), running.cancel("", "two")) == (1, 0)
        await asyncio.Event().wait()
