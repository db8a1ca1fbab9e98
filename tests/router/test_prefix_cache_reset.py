"""B16: an operator drops the prefix caches of all workers that are attached to a router."""

import logging
from typing import Any

import pytest

from contract.identity import Role
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.text.tiny_model import END

HELLO = Script(tokens=[END])
PATH = "/admin/reset_prefix_cache"


async def reset(cluster: Cluster) -> tuple[int, dict[str, Any]]:
    async with cluster.session.post(f"http://{cluster.service.addresses.admin}{PATH}") as response:
        return response.status, await response.json()


async def test_every_worker_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_cluster(HELLO, PAIR) as cluster:
        await cluster.add(Role.DECODE, "decode-1")
        assert await reset(cluster) == (200, {"workers": ["prefill-0", "decode-0", "decode-1"]})
        assert [len(worker.received.resets) for worker in cluster.workers.values()] == [1, 1, 1]
    assert "the prefix caches are dropped by 127.0.0.1" in caplog.text


async def test_a_worker_that_holds_blocks_is_named_with_its_reason() -> None:
    """The others drop theirs; once it holds none, it does so as well."""
    async with running_cluster(HELLO, PAIR) as cluster:
        cluster.workers["decode-0"].holds_blocks = True
        status, answer = await reset(cluster)
        assert (status, answer["workers"]) == (409, ["prefill-0"])
        (refused,) = answer["refused"]
        assert refused["id"] == "decode-0" and refused["reason"].endswith("blocks are held")
        assert refused["reason"] in answer["error"]["message"]
        cluster.workers["decode-0"].holds_blocks = False
        assert await reset(cluster) == (200, {"workers": ["prefill-0", "decode-0"]})


async def test_a_worker_whose_port_is_closed_is_named_too() -> None:
    async with running_cluster(HELLO, PAIR) as cluster:
        await cluster.workers["decode-0"].close_port()
        status, answer = await reset(cluster)
        assert (status, answer["workers"]) == (409, ["prefill-0"])
        assert [refused["id"] for refused in answer["refused"]] == ["decode-0"]


async def test_without_workers_there_is_no_cache_to_drop() -> None:
    async with running_cluster(HELLO, ()) as cluster:
        assert await reset(cluster) == (200, {"workers": []})
