"""kvbaton-client: against a real router, and installed alone as others do."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from kvbaton_client import AsyncClient, Client, SamplingParams

from contract.identity import Role
from protos import worker_pb2
from tests.chaos.settings import process_environment
from tests.fakes.router.script import Script
from tests.router.cluster import MODEL, Cluster, running_cluster
from tests.text.tiny_model import END, byte_ids

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Script(tokens=[*byte_ids(b"yes"), END])


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running_cluster(SCRIPT, roles=(Role.AGGREGATED,)) as running:
        yield running


async def test_the_client_for_coroutines_gives_whole_answers_and_streams(cluster: Cluster) -> None:
    async with AsyncClient(cluster.service.addresses.grpc) as client:
        whole = await client.generate("hi", sampling=SamplingParams(max_tokens=9), cache_salt="s", priority=3)
        pieces = [message async for message in client.stream(byte_ids(b"hi"), request_id="mine")]
        assert [model.name for model in await client.models()] == [MODEL]
        ids = await client.tokenize("hi")
        assert (ids, await client.detokenize(ids)) == (byte_ids(b"hi"), "hi")
    assert (whole.choices[0].text, whole.usage.completion_tokens) == ("yes", 4)
    assert "".join(piece.choices[0].text for piece in pieces) == "yes"
    assert {piece.request_id for piece in pieces} == {"mine"}
    tasks = [request.task for request in cluster.workers["both-0"].received.decodes]
    assert [list(task.prompt_token_ids) for task in tasks] == [byte_ids(b"hi")] * 2
    assert (tasks[0].cache_salt, tasks[0].priority, tasks[0].sampling.max_tokens) == ("s", 3, 9)


async def test_the_client_for_threads_does_the_same(cluster: Cluster) -> None:
    def use() -> tuple[str, str, list[int], str, list[str]]:
        with Client(cluster.service.addresses.grpc, timeout_seconds=30) as client:
            ids = client.tokenize("hi")
            streamed = "".join(piece.choices[0].text for piece in client.stream("hi"))
            names = [model.name for model in client.models()]
            return client.generate(ids).choices[0].text, streamed, ids, client.detokenize(ids), names

    assert await asyncio.to_thread(use) == ("yes", "yes", byte_ids(b"hi"), "hi", [MODEL])


async def test_prompts_are_embedded_by_both_clients() -> None:
    def script(task: worker_pb2.Task) -> Script:
        return Script(embedding=(0.5, len(task.prompt_token_ids)))

    def use(address: str) -> list[list[float]]:
        with Client(address, timeout_seconds=30) as client:
            return [list(each.values) for each in client.embed(["hi", byte_ids(b"you")]).embeddings]

    async with running_cluster(script, roles=(Role.AGGREGATED,)) as cluster:
        address = cluster.service.addresses.grpc
        assert await asyncio.to_thread(use, address) == [[0.5, 2.0], [0.5, 3.0]]
        async with AsyncClient(address, timeout_seconds=30) as client:
            found = await client.embed(
                [byte_ids(b"a"), "hi"], model=MODEL, request_id="mine", priority=3, cache_salt="s"
            )
            with pytest.raises(grpc.aio.AioRpcError, match="dimensions") as caught:
                await client.embed(["hi"], dimensions=3)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(TypeError, match="a list of prompts"):
                await client.embed("hi")
        assert [list(each.values) for each in found.embeddings] == [[0.5, 1.0], [0.5, 2.0]]
        assert (found.request_id, found.usage.prompt_tokens) == ("mine", 3)
        last = cluster.workers["both-0"].received.embeds[-1].task
        assert (last.priority, last.cache_salt) == (3, "s")


async def test_leaving_a_stream_cancels_the_request(cluster: Cluster) -> None:
    cluster.script = lambda _: Script(tokens=byte_ids(b"yes"), stall_at=1)
    async with AsyncClient(cluster.service.addresses.grpc) as client:
        stream = client.stream("hi")
        assert (await anext(stream)).choices[0].text == "y"
        await stream.aclose()
        await cluster.until(lambda state: not any(state["requests"].values()))

    def leave() -> None:
        with Client(cluster.service.addresses.grpc) as client:
            stream = client.stream("hi")
            next(stream)
            stream.close()

    await asyncio.to_thread(leave)
    await cluster.until(lambda state: not any(state["requests"].values()))
    assert len(cluster.workers["both-0"].received.decodes) == 2


async def test_a_request_is_cancelled_by_its_name(cluster: Cluster) -> None:
    cluster.script = lambda _: Script(tokens=byte_ids(b"yes"), stall_at=1)
    async with AsyncClient(cluster.service.addresses.grpc) as client:
        stream = client.stream("hi", request_id="mine")
        await anext(stream)
        assert [await client.cancel(name) for name in ("other", "mine")] == [0, 1]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(stream)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
    with Client(cluster.service.addresses.grpc) as client:
        assert await asyncio.to_thread(client.cancel, "mine") == 0


async def test_a_key_is_sent(tmp_path: Path) -> None:
    async with running_cluster(SCRIPT, roles=(Role.AGGREGATED,), api_keys="right,other") as cluster:
        address = cluster.service.addresses.grpc
        async with AsyncClient(address, api_key="right") as client:
            assert (await client.generate("hi")).choices[0].text == "yes"
        async with AsyncClient(address, api_key="wrong") as client:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.generate("hi")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_errors_are_those_of_grpc(cluster: Cluster) -> None:
    async with AsyncClient(cluster.service.addresses.grpc, timeout_seconds=30) as client:
        with pytest.raises(grpc.aio.AioRpcError, match="temperature") as caught:
            await client.generate("hi", sampling=SamplingParams(temperature=9))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.generate("hi", model="other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


ALONE = """
import sys
import kvbaton_client
from kvbaton_client import Client, SamplingParams
assert kvbaton_client.__file__.startswith(sys.argv[1]), kvbaton_client.__file__
with Client(sys.argv[2]) as client:
    print(client.generate("hi", sampling=SamplingParams(max_tokens=9)).choices[0].text)
print(sorted({"protos", "contract", "router", "kvbaton"} & sys.modules.keys()))
"""


def install(folder: Path) -> None:
    """Build the client's wheel and install it below ``folder``, as ``pip install ./clients/python`` would."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "wheel")]
    subprocess.run(build, cwd=ROOT / "clients" / "python", check=True, capture_output=True)
    (wheel,) = (folder / "wheel").glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*command, "--target", str(folder / "site"), str(wheel)], check=True, cwd=folder)


async def test_the_package_works_without_the_server(cluster: Cluster, tmp_path: Path) -> None:
    await asyncio.to_thread(install, tmp_path)
    site = str(tmp_path / "site")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", ALONE, site, cluster.service.addresses.grpc),
        cwd=tmp_path,
        env={**process_environment(), "PYTHONPATH": site},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert (output.decode(), errors.decode()) == ("yes\n[]\n", "")
