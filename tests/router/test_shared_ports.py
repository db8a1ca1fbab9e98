"""Two routers on one port: while one drains, new connections reach the other, and open answers end."""

import asyncio
from contextlib import AsyncExitStack

import aiohttp
import grpc.aio

from contract.identity import Role
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster

TOKENS = [72, 101, 108, 108, 111]
TEXT = "/v1/completions"


async def test_a_router_that_drains_leaves_a_shared_port_to_the_other() -> None:
    async with AsyncExitStack() as stack:
        slow = Script(tokens=TOKENS, token_delay_seconds=0.2)
        leaving = await stack.enter_async_context(
            running_cluster(slow, (Role.AGGREGATED,), reuse_port=True, drain_seconds=20)
        )
        addresses = leaving.service.addresses
        asking = asyncio.create_task(leaving.post(TEXT, {"prompt": "x"}))
        await leaving.until(lambda state: state["requests"]["streaming"])
        other = await stack.enter_async_context(
            running_cluster(
                Script(tokens=TOKENS),
                (Role.AGGREGATED,),
                reuse_port=True,
                http=addresses.http,
                grpc=addresses.grpc,
            )
        )
        draining = asyncio.create_task(leaving.service.drain(asyncio.Event()))
        await leaving.until(lambda state: not state["is_ready"])
        for _ in range(30):
            async with aiohttp.ClientSession() as session:
                url = f"http://{addresses.http}{TEXT}"
                async with session.post(url, json={"prompt": "x"}) as response:
                    assert response.status == 200
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(addresses.grpc, options=options) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                request = pb.GenerateRequest(text="x")
                assert [message async for message in stub.Generate(request, timeout=20)]
        assert other.service.is_ready
        status, _ = await asking
        assert status == 200
        async with asyncio.timeout(20):
            await draining
