"""A request ends without garbage in cycles of references: the search for them would stop the event loop."""

import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from contract.identity import Role
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.test_ends import TOKENS, nothing_is_left

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 20}
Send = Callable[[Cluster], Awaitable[object]]


async def completion(cluster: Cluster) -> object:
    status, answer = await cluster.post("/v1/completions", BODY)
    assert status == 200
    return answer


async def two_choices(cluster: Cluster) -> object:
    status, answer = await cluster.post("/v1/completions", {**BODY, "n": 2})
    assert status == 200
    return answer


async def stream(cluster: Cluster) -> object:
    return await cluster.stream("/v1/completions", BODY)


async def refusal(cluster: Cluster) -> object:
    status, answer = await cluster.post("/v1/completions", {**BODY, "prompt": [5] * 1000})
    assert status == 400
    return answer


@asynccontextmanager
async def garbage() -> AsyncIterator[list[str]]:
    """Yield a list that holds, after the block, the names of the router's classes whose objects were found in cycles."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        names = [f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage]
        found += sorted({name for name in names if name.startswith(("router.", "serving."))})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("send", [completion, two_choices, stream, refusal])
@pytest.mark.parametrize("roles", [PAIR, (Role.AGGREGATED,)], ids=["pair", "alone"])
async def test_a_request_leaves_no_cycle_of_references(roles: tuple[Role, ...], send: Send) -> None:
    async with running_cluster(Script(tokens=TOKENS), roles) as cluster:
        await send(cluster)
        await nothing_is_left(cluster)
        async with garbage() as found:
            await send(cluster)
            await nothing_is_left(cluster)
        assert found == []
