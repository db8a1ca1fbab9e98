"""Bytes of requests are bounded while they wait and are answered, not only while they arrive."""

import asyncio
from typing import Any

import grpc.aio
import hypothesis.strategies as st
import pytest
from hypothesis import given

from contract.errors import OverloadedError
from contract.identity import Role
from protos import inference_pb2 as pb
from router.intake.limits import HeldBytes
from tests.fakes.router.script import Script
from tests.router.batch_cluster import key
from tests.router.cluster import Cluster, running_cluster
from tests.text.tiny_model import END, byte_ids

TEXT = "/v1/completions"
STALLED = Script(tokens=[*byte_ids(b"ab"), END], stall_at=1)
BODY = {"prompt": "x", "user": "u" * 1500}
LIMIT = 2000


async def stalled(cluster: Cluster, count: int) -> None:
    await cluster.until(lambda state: state["requests"]["streaming"] == count)


async def test_a_request_that_is_answered_counts_until_its_end() -> None:
    """H1, H2: a thousand requests of 8 MiB, whose bulk is a field that nothing needs, waited with 8 GiB together."""
    async with running_cluster(STALLED, (Role.AGGREGATED,), max_held_bytes=LIMIT) as cluster:
        first = asyncio.create_task(cluster.post(TEXT, BODY))
        await stalled(cluster, 1)
        status, answer = await cluster.post(TEXT, BODY)
        assert (status, "max_held_bytes" in answer["error"]["message"]) == (429, True)
        assert (await cluster.post("/tokenize", {"prompt": "x"}))[0] == 200, "there is room for a small one"
        first.cancel()
        await stalled(cluster, 0)
        second = asyncio.create_task(cluster.post(TEXT, BODY))
        await stalled(cluster, 1)
        second.cancel()


async def test_grpc_messages_count_with_them() -> None:
    """H1, H2: unknown fields of a message count too."""
    message = pb.GenerateRequest.FromString(pb.GenerateRequest(text="x").SerializeToString() + unknown(1500))
    async with (
        running_cluster(STALLED, (Role.AGGREGATED,), max_held_bytes=LIMIT) as cluster,
        cluster.channel() as channel,
    ):
        stub: Any = cluster.inference(channel)
        first = stub.Generate(message)
        await stalled(cluster, 1)
        with pytest.raises(grpc.aio.AioRpcError, match="max_held_bytes") as refused:
            await stub.GenerateOnce(message)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await cluster.post(TEXT, BODY))[0] == 429
        first.cancel()
        await stalled(cluster, 0)
        second = stub.Generate(message)
        await stalled(cluster, 1)
        second.cancel()


def unknown(count: int) -> bytes:
    """Return an unknown field of ``num_bytes`` bytes, below 16,384."""
    return bytes([0xFA, 0x7F, count & 0x7F | 0x80, count >> 7]) + bytes(count)


async def test_a_key_that_holds_most_does_not_keep_others_out() -> None:
    """M3: each key that holds any has its share."""
    async with running_cluster(
        STALLED, (Role.AGGREGATED,), max_held_bytes=4000, api_keys="alice,bob"
    ) as cluster:
        asking = [asyncio.create_task(cluster.post(TEXT, BODY, headers=key("alice"))) for _ in range(2)]
        await cluster.until(lambda state: state["requests"]["streaming"] == 2)
        assert (await cluster.post(TEXT, BODY, headers=key("alice")))[0] == 429
        asking.append(asyncio.create_task(cluster.post(TEXT, BODY, headers=key("bob"))))
        await cluster.until(lambda state: state["requests"]["streaming"] == 3)
        for task in asking:
            task.cancel()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.booleans()), max_size=60))
def test_no_more_than_twice_the_limit_is_held(asked: list[tuple[str, int, bool]]) -> None:
    """All bytes are released at the end."""
    held = HeldBytes(100)
    open_blocks = []
    for tenant, size, ends in asked:
        block = held.holding(tenant, size)
        try:
            block.__enter__()
        except OverloadedError:
            assert held.num_bytes + size > 100
            continue
        open_blocks.append(block)
        assert held.num_bytes <= 200
        if ends:
            open_blocks.pop(0).__exit__(None, None, None)
    for block in open_blocks:
        block.__exit__(None, None, None)
    assert held.num_bytes == 0
