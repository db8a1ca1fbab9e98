"""B16: an operator has all workers read their weights again, while requests run and others arrive."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc.aio
import pytest

from contract.identity import Role
from protos import worker_pb2 as pb
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.test_ends import TEXT, TOKENS
from tests.text.tiny_model import END

HELLO = Script(tokens=[END])
OLD, NEW, OTHER = "model-a@float32", "model-b@float32", "model-c@float32"


async def reload(cluster: Cluster, wait: float = 30.0) -> tuple[int, dict[str, Any]]:
    url = f"http://{cluster.service.addresses.admin}/admin/reload_weights?wait={wait}"
    async with cluster.session.post(url) as response:
        return response.status, await response.json()


def reasons(answer: dict[str, Any]) -> dict[str, str]:
    return {refused["id"]: refused["reason"] for refused in answer["refused"]}


def num_loads(cluster: Cluster) -> int:
    orders = [order for worker in cluster.workers.values() for order in worker.received.reload_orders]
    return sum(order.step == "load" for order in orders)


async def attached(cluster: Cluster, *names: str) -> None:
    """Wait until these workers are attached, and no others."""
    await cluster.until(lambda state: {each["worker_id"] for each in state["workers"]} == set(names))


async def test_requests_wait_for_the_new_weights_and_none_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where requests do not wait for a role without workers: the workers offer no credit, and are there."""
    caplog.set_level(logging.INFO)
    async with running_cluster(HELLO, PAIR) as cluster:
        prefill, decode = cluster.workers.values()
        decode.is_empty.clear()
        answer = asyncio.create_task(reload(cluster))
        await cluster.until(lambda state: not any(each["max_requests"] for each in state["workers"]))
        waiting = asyncio.create_task(cluster.post(TEXT, {"prompt": "x"}))
        await cluster.until(lambda state: state["num_in_line"] == 1)
        assert (num_loads(cluster), len(prefill.received.prefills)) == (0, 0)
        decode.is_empty.set()
        assert await answer == (200, {"workers": ["prefill-0", "decode-0"], "model_fingerprint": NEW})
        assert (await waiting)[0] == 200
        for worker in (prefill, decode):
            (load, serve) = worker.received.reload_orders
            assert (load.step, serve.step) == ("load", "serve") and load.epoch == serve.epoch > 0
        with pytest.raises(grpc.aio.AioRpcError, match=f"{OLD}, this router serves {NEW}"):
            await cluster.add(Role.DECODE, "decode-1")
        await cluster.add(Role.DECODE, "decode-2", model_fingerprint=NEW)
        # An epoch that is not greater changes nothing.
        assert (await reload(cluster))[0] == 200
    assert "the weights are reloaded by 127.0.0.1" in caplog.text


async def test_nothing_changes_when_requests_do_not_end_in_time() -> None:
    async with running_cluster(HELLO, PAIR) as cluster:
        cluster.workers["decode-0"].is_empty.clear()
        status, answer = await reload(cluster, wait=0.05)
        assert (status, answer["workers"]) == (409, [])
        assert "model_fingerprint" not in answer and "nothing has changed" in answer["error"]["message"]
        assert "was not empty after 0.05 s" in reasons(answer)["decode-0"]
        assert num_loads(cluster) == 0
        assert (await cluster.post(TEXT, {"prompt": "x"}))[0] == 200
        cluster.workers["decode-0"].is_empty.set()
        assert (await reload(cluster))[0] == 200


async def test_one_worker_that_cannot_be_reloaded_keeps_the_weights_of_all() -> None:
    """It is named at once, whatever the others still compute."""
    async with running_cluster(HELLO, PAIR) as cluster:
        cluster.workers["prefill-0"].is_empty.clear()
        cluster.workers["decode-0"].reload_refusal = "its folder has another model"
        status, answer = await reload(cluster)
        assert (status, num_loads(cluster)) == (409, 0)
        assert list(reasons(answer)) == ["decode-0"]
        assert "its folder has another model" in answer["error"]["message"]
        assert (await cluster.post(TEXT, {"prompt": "x"}))[0] == 200


@pytest.mark.parametrize("read", [OTHER, None])
async def test_a_worker_that_disagrees_is_left_out(read: str | None) -> None:
    """The weights that most have read are served; a worker with others, or the former ones, is named and detached."""
    async with running_cluster(HELLO, PAIR) as cluster:
        bad = await cluster.add(Role.DECODE, "decode-1")
        bad.weights = read
        status, answer = await reload(cluster)
        assert (status, answer["workers"], answer["model_fingerprint"]) == (
            409,
            ["prefill-0", "decode-0"],
            NEW,
        )
        (reason,) = reasons(answer).values()
        assert (f"fingerprint {OTHER}, and {NEW} is served" if read else "a shard is missing") in reason
        await attached(cluster, "prefill-0", "decode-0")
        assert (await cluster.post(TEXT, {"prompt": "x"}))[0] == 200
        with pytest.raises(grpc.aio.AioRpcError, match=f"this router serves {NEW}"):
            await cluster.add(Role.DECODE, "decode-1", model_fingerprint=read or OLD)


async def test_the_weights_of_a_later_reload_are_served() -> None:
    """A router that was not asked, or was away, learns them from the workers. One without credit may be late."""
    async with running_cluster(HELLO, PAIR) as cluster:
        prefill, decode = cluster.workers.values()
        decode.stream.grant(pb.Credit(number=1))
        await cluster.until(lambda state: state["workers"][1]["max_requests"] == 0)
        prefill.stream.report_weights(pb.WeightsLoaded(model_fingerprint=NEW, epoch=5))
        await cluster.until(lambda _: cluster.service._path.registry.weights.epoch == 5)
        await cluster.add(Role.DECODE, "decode-1", model_fingerprint=NEW)
        await attached(cluster, "prefill-0", "decode-0", "decode-1")
        decode.stream.report_weights(pb.WeightsLoaded(model_fingerprint=NEW, epoch=5))
        decode.stream.grant(pb.Credit(max_requests=8, max_tokens=1000))
        await cluster.until(lambda state: all(each["max_requests"] for each in state["workers"]))
        # An earlier reload changes nothing; a later one is that of a worker that attaches, too.
        with pytest.raises(grpc.aio.AioRpcError):
            await cluster.add(Role.DECODE, "decode-2", model_fingerprint=OTHER, weights_epoch=5)
        await cluster.add(Role.DECODE, "decode-2", model_fingerprint=OTHER, weights_epoch=6)
        await attached(cluster, "decode-2")


@asynccontextmanager
async def interrupted(*roles: Role) -> AsyncIterator[tuple[Cluster, aiohttp.ClientResponse]]:
    """Stream an answer whose last worker is lost after the first tokens; yield when it is."""

    def script(task: pb.Task) -> Script:
        return Script(tokens=TOKENS, stall_at=None if task.attempt else 2)

    async with running_cluster(script, roles, worker_wait_seconds=60) as cluster:
        body = {"prompt": "x", "stream": True}
        async with cluster.session.post(cluster.url(TEXT), json=body) as response:
            await response.content.readline()
            *others, last = cluster.workers
            await cluster.workers[last].die()
            await attached(cluster, *others)
            yield cluster, response


async def test_an_answer_is_not_continued_with_other_weights() -> None:
    """The only worker that could continue it has loaded others: the client gets an error."""
    async with interrupted(Role.AGGREGATED) as (cluster, response):
        other = await cluster.add(Role.AGGREGATED, "both-1", model_fingerprint=NEW, weights_epoch=5)
        assert "the weights were reloaded before the answer could be continued" in await response.text()
        assert not other.received.decodes
        assert (await cluster.post(TEXT, {"prompt": "x", "max_tokens": 1}))[0] == 200


async def test_an_answer_that_waits_to_be_continued_keeps_the_weights() -> None:
    """It is continued by the weights that have begun it."""
    async with interrupted(*PAIR) as (cluster, response):
        status, answer = await reload(cluster)
        assert (status, num_loads(cluster)) == (409, 0)
        assert "waits to be continued" in answer["error"]["message"]
        await cluster.add(Role.DECODE, "decode-1")
        text = await response.text()
        assert "[DONE]" in text and "error" not in text


async def test_without_workers_there_is_nothing_to_reload() -> None:
    async with running_cluster(HELLO, ()) as cluster:
        assert await reload(cluster) == (200, {"workers": []})
