"""`kvbaton up` from its users' view: answers, the latency split, cancelled requests, killed workers, a clean end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from protos import inference_pb2 as pb
from tests.service import Service, generate_all, running_service

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

REPOSITORY = Path(__file__).parents[2]
PARTS = ("queue", "prefill", "transfer", "first_decode_step", "decode")
OF_QUEUE = ("intake", "placement", "worker", "engine_queue", "messages")
BLOCK_BYTES = 32768
REPLAYED_TOKENS = 600
LONG = {
    "model": "demo",
    "prompt": "Hello",
    "max_tokens": 1900,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    arguments = ("--prefill", "1", "--decode", "1", "--transport", "tcp", "--served-model-name", "demo")
    async with running_service(tmp_path, *arguments) as running:
        yield running


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds; the test's own time limit bounds it."""
    while not await condition():
        await asyncio.sleep(0.05)


async def is_idle(service: Service) -> bool:
    """Return True if no worker holds a request, a block, a lease or a transfer."""
    states = await service.debug_states()
    workers = [state for name, state in states.items() if not name.startswith("router")]
    return all(
        state["num_accepted"] == 0
        and state["engine_process"]["num_open_fds"] > 0
        and state["blocks"]["held"] == state["blocks"]["quarantined"] == 0
        and state["requests"] == {}
        and state["leases"] == []
        and state["connector"]["fetches"] == state["connector"]["leases"] == []
        for state in workers
    )


async def test_a_service_in_daily_use(service: Service) -> None:
    """HTTP and gRPC give equal answers, latencies sum up, cancelled requests free everything, a killed worker is a pause."""
    await check_answers(service)
    await check_grammars(service)
    await check_conversation(service)
    await check_examples(service)
    await check_leaving_clients(service)
    await check_worker_death(service)


async def check_answers(service: Service) -> None:
    chat = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Who are you?"}],
        "temperature": 0,
        "timings": True,
    }
    status, body = await service.post("/v1/chat/completions", chat)
    assert status == 200
    timings: dict[str, float] = body["kvbaton"]["timings"]
    assert sum(timings[part] for part in PARTS) == pytest.approx(timings["end_to_end"])
    assert all(timings[part] >= 0 for part in PARTS)
    assert sum(timings[part] for part in OF_QUEUE) == timings["queue"]
    assert all(timings[part] > 0 for part in OF_QUEUE), timings
    ids = pb.TokenIds(ids=[0, 3, 10, 20, 30])
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    [answer] = await generate_all(service.grpc, [pb.GenerateRequest(token_ids=ids, sampling=sampling)], 1)
    assert answer.timings is not None
    parts = sum(getattr(answer.timings, part) for part in PARTS)
    assert parts == pytest.approx(answer.timings.end_to_end)
    assert (answer.timings.transfer_bytes, answer.timings.transfer_pieces) == (BLOCK_BYTES, 1)
    body = {
        "model": "demo",
        "prompt": [0, 3, 10, 20, 30],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    status, completion = await service.post("/v1/completions", body)
    assert completion["choices"][0]["text"] == answer.text
    assert completion["usage"]["total_tokens"] == 13


async def check_grammars(service: Service) -> None:
    """With both workers the text satisfies the schema; a grammar that does not compile is the client's error."""
    schema = {
        "type": "object",
        "properties": {"word": {"type": "string", "maxLength": 9}, "count": {"enum": [1, 2, 3]}},
        "required": ["word", "count"],
        "additionalProperties": False,
    }
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Who are you?"}], "seed": 3}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    status, body = await service.post("/v1/chat/completions", {**chat, "response_format": form})
    assert status == 200 and body["choices"][0]["finish_reason"] == "stop", body
    found = json.loads(body["choices"][0]["message"]["content"])
    assert list(found) == ["word", "count"] and len(found["word"]) <= 9 and found["count"] in (1, 2, 3)
    status, body = await service.post("/v1/chat/completions", {**chat, "guided_regex": "(a"})
    assert (status, body["error"]["param"]) == (400, "guided_regex")
    assert "unclosed group" in body["error"]["message"]


async def check_conversation(service: Service) -> None:
    """Ten turns: each finds all whole blocks of the turn before in the cache, and computes only the rest."""
    messages: list[dict[str, str]] = []
    cached, total = [], 0
    for turn in range(10):
        messages.append({"role": "user", "content": f"lamp: fox\ncomet: ginger {turn}\nWhat is lamp?"})
        body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 24}
        status, answer = await service.post("/v1/chat/completions", body)
        assert status == 200, answer
        usage = answer["usage"]
        cached.append((usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"])
        assert cached[-1] >= total // 16 * 16 - 16, cached
        total = usage["prompt_tokens"]
        messages.append(answer["choices"][0]["message"])
    assert cached[0] == 0 and sorted(set(cached)) == cached, cached


async def check_examples(service: Service) -> None:
    """Run the examples of the README."""
    chat = await run_example("openai_chat", f"http://{service.http}")
    assert chat == "comet: ginger\n"
    answer, timings, counts, _ = (await run_example("grpc_generate", service.grpc)).split("\n")
    assert answer == "fox lake moon"
    assert timings.startswith("prefill ") and "transfer" in timings
    assert counts.endswith("tokens out")


async def run_example(name: str, address: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"examples.{name}", address, cwd=REPOSITORY, stdout=subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def check_leaving_clients(service: Service) -> None:
    """Disconnect clients after some events, or before the first: nothing of their requests is left on any worker."""
    async with aiohttp.ClientSession() as session:
        for num_events in (0, 1, 5):
            async with session.post(f"http://{service.http}/v1/completions", json=LONG) as response:
                for _ in range(num_events):
                    await response.content.readline()
        waiting = asyncio.create_task(service.post("/v1/completions", {**LONG, "stream": False}))
        await until(lambda: _has_requests(service))
        waiting.cancel()
    await until(lambda: is_idle(service))


async def _has_requests(service: Service) -> bool:
    return not await is_idle(service)


async def check_worker_death(service: Service) -> None:
    """Kill the only decode worker in mid-stream: when it is back, the stream continues with the same text."""
    undisturbed = await stream_text(service, victim=None)
    decode = next(p for p in service.processes if p["role"] == "decode")
    assert await stream_text(service, victim=decode["pid"]) == undisturbed
    await until(lambda: _has_new_decode(service, decode["pid"]))
    await until(lambda: is_idle(service))


async def stream_text(service: Service, victim: int | None) -> str:
    """Return the text of one long answer, in the middle of which a process is killed."""
    lines = []
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{service.http}/v1/completions", json={**LONG, "max_tokens": REPLAYED_TOKENS}
        ) as stream,
    ):
        async for line in stream.content:
            if line.startswith(b"data: "):  # not a keep-alive, which a slow machine brings
                lines.append(line.decode().removeprefix("data: "))
                if len(lines) == 3 and victim is not None:
                    os.kill(victim, signal.SIGKILL)
    assert lines[-1] == "[DONE]\n"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


async def _has_new_decode(service: Service, old_pid: int) -> bool:
    service.read_ready()
    decode: dict[str, Any] = next((p for p in service.processes if p["role"] == "decode"), {"pid": old_pid})
    return bool(decode["pid"] != old_pid)


def _shared_memory() -> set[Path]:
    """Return what is in /dev/shm, but for semaphores of multiprocessing: any process has their names while it makes one."""
    return {path for path in Path("/dev/shm").glob("*") if not path.name.startswith("sem.mp-")}


async def test_sigterm_leaves_nothing(tmp_path: Path) -> None:
    """After SIGTERM: exit code 0, no process of it lives, nothing new in /dev/shm, the ready file is gone."""
    before = _shared_memory()
    async with running_service(tmp_path, "--both", "1") as service:
        children = psutil.Process(service.process.pid).children(recursive=True)
        assert len(children) >= 3
    assert service.process.returncode == 0
    assert not [child for child in children if is_alive(child)]
    assert not _shared_memory() - before
    assert not service.ready_file.exists()


def is_alive(process: psutil.Process) -> bool:
    """Return True unless the process has ended; a zombie has ended and waits for its parent to reap it."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
