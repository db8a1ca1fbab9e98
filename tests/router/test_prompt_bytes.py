"""What prompts cost the router before it knows whether they fit."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from contract.errors import OverloadedError
from contract.identity import Role
from protos import inference_pb2 as pb
from router.testing import Script
from router.tokenizing import TokenizerThreads, size_of
from tests.router.cluster import Cluster, running_cluster
from tests.text.tiny_model import END, model_files, write_model
from text.chat import Chat

HELLO = Script(tokens=[END])
LONG = "hello " * 1_300_000
MIB = 2**20


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


@contextmanager
def growing_less_than(num_bytes: int) -> Iterator[None]:
    """Fail where this process needs as many bytes more at any time within the block."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before = _status("VmRSS")
    yield
    assert _status("VmHWM") - before < num_bytes


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running_cluster(HELLO, (Role.BOTH,)) as cluster:
        yield cluster


async def _refused(cluster: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    data = BytesIO(json.dumps(body).encode())
    headers = {"Content-Type": "application/json"}
    async with cluster.session.post(cluster.url(path), data=data, headers=headers) as response:
        assert response.status == 400
        return dict((await response.json())["error"])


BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": ["a", LONG]}, "prompt"),
    ("/v1/embeddings", {"input": LONG}, "input"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/tokenize", {"prompt": LONG}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "param"), BODIES)
async def test_eight_megabytes_cost_no_more_than_their_copies(
    path: str, body: dict[str, Any], param: str, cluster: Cluster
) -> None:
    """H2, P9: a prompt of 8 MiB is refused before it is tokenized; six at once cost what their bytes cost."""
    with growing_less_than(400 * MIB):
        errors = await asyncio.gather(*(_refused(cluster, path, body) for _ in range(6)))
    for error in errors:
        assert error["code"] == "context_length_exceeded"
        assert error["param"] in (param, "messages")


async def test_grpc_texts_are_bounded_alike(cluster: Cluster) -> None:
    """H2: Generate and Tokenize refuse before they tokenize."""
    async with cluster.channel() as channel:
        stub = cluster.inference(channel)
        with growing_less_than(400 * MIB):
            for call, request in (
                (stub.GenerateOnce, pb.GenerateRequest(text=LONG)),
                (stub.Tokenize, pb.TokenizeRequest(text=LONG)),
            ):
                with pytest.raises(Exception, match="maximum context length"):
                    await call(request)


async def test_the_prompts_of_one_request_are_bounded_together(tmp_path: Path) -> None:
    """H2: prompts that fit one by one do not add up without a limit."""
    model = write_model(tmp_path / "model", model_files(max_position_embeddings=8192))
    async with running_cluster(HELLO, (), model=model) as cluster:
        await cluster.add(Role.BOTH, max_model_len=8192, model_name="model")
        error = await _refused(cluster, "/v1/completions", {"prompt": ["a" * 6000] * 200, "max_tokens": 1})
    assert "1048576 tokens together" in error["message"]


async def test_texts_that_wait_are_bounded_together() -> None:
    """H2: what cannot be tokenized at once waits, up to a number of characters; then the service is full."""
    threads = TokenizerThreads(max_waiting_characters=100_000)
    begun, release = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold() -> str:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
        return "done"

    first = asyncio.create_task(threads.run(90_000, hold))
    await begun.wait()
    with pytest.raises(OverloadedError, match="90000 characters"):
        await threads.run(20_000, lambda: "never")
    assert await threads.run(100, lambda: "short") == "short"
    assert await threads.run(5_000, lambda: "beside") == "beside"
    release.set()
    assert await first == "done"
    assert threads.num_waiting == 0
    threads.close()


async def test_a_text_longer_than_what_may_wait_is_not_shut_out() -> None:
    """H2: alone it may always be tokenized."""
    threads = TokenizerThreads(max_waiting_characters=10)
    assert await threads.run(2**20, lambda: 7) == 7
    threads.close()


def test_the_size_of_a_chat_counts_all_its_texts() -> None:
    """H2: calls, parts and documents count as well."""
    messages: Any = [{"role": "user", "content": "x" * 10, "tool_calls": [{"arguments": {"a": ["y" * 20]}}]}]
    size = size_of(Chat(messages=messages, documents=({"text": "z" * 30},)))
    assert size - size_of(Chat(messages=[])) == 4 + 10 + 20 + 30
