"""``kvbaton batch`` without a service (A23): a router in its own process, and no HTTP."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.batch import post_without_http, send
from cli.batch_files import BatchRequest
from router.service import RouterService
from router.settings import RouterSettings
from tests.chaos.settings import process_environment
from tests.fakes.router.script import Script
from tests.router.cluster import SECRET, running_cluster
from tests.text.tiny_model import END, byte_ids

CHAT = {"messages": [{"role": "user", "content": "hi"}], "seed": 1, "logprobs": True, "n": 2}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["hi", "ho"], "priority": 1, "return_token_ids": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/embeddings", {"input": ["ab", "c"], "encoding_format": "base64"}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 9}),
    ("/v1/completions", {"prompt": "hi", "n": -1}),
    ("/v1/embeddings", {"input": []}),
    ("/v1/chat/completions", {**CHAT, "model": "nobody's"}),
]


def told(body: dict[str, Any]) -> str:
    """Return the text of a body, but for its names and times, in the order of its fields."""
    return json.dumps(
        {
            key: value
            for key, value in body.items()
            if key not in ("id", "created", "created_at", "completed_at", "output")
        }
    )


async def test_a_line_is_answered_without_http_as_with_it() -> None:
    """A23: the same status and the same body, of answers and of errors."""
    async with running_cluster(Script(tokens=[*byte_ids(b"yes"), END])) as cluster:
        post = post_without_http(cluster.service.line_answers)
        for path, body in BODIES:
            status, by_http = await cluster.post(path, body)
            offline = await send(BatchRequest(1, "a", path, json.dumps(body).encode()), post, 0)
            assert offline.status_code == status
            assert told(json.loads(bytes(offline.body))) == told(by_http)
            assert by_http.get("id", offline.request_id)[:5] == offline.request_id[:5]


async def test_an_offline_router_listens_for_workers_only() -> None:
    """A23: of the four ports, only the one of the workers is opened."""
    own = psutil.Process()
    before = listening(own)
    router = RouterService(RouterSettings(secret=SECRET, http="127.0.0.1:0", grpc="127.0.0.1:0"))
    await router.start(has_public_ports=False)
    try:
        addresses = router.addresses.as_dict()
        assert listening(own) - before == {int(addresses.pop("internal").rpartition(":")[2])}
        assert set(addresses.values()) == {""}
    finally:
        await router.stop()


def listening(process: psutil.Process) -> set[int]:
    """Return the TCP ports on which a process listens."""
    found = process.net_connections("tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("flag", ["http", "grpc", "ready_file"])
async def test_ports_of_a_batch_without_a_service_are_refused(flag: str, tmp_path: Path) -> None:
    process = await started(tmp_path, f"--{flag.replace('_', '-')}", "127.0.0.1:0")
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors.decode().startswith(f"kvbaton: {flag} would have no effect: without --url")


async def started(folder: Path, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", "batch", "-i", str(folder / "in"), "-o", str(folder / "out")),
        *flags,
        stderr=asyncio.subprocess.PIPE,
        env=process_environment(),
    )


@pytest.mark.slow
@pytest.mark.e2e
async def test_a_batch_runs_a_model_of_its_own_without_http(tmp_path: Path) -> None:
    """A23: the demo model with the default pools, stopped halfway and continued; no process of the batch is left."""
    body = {"prompt": "Once", "temperature": 0, "max_tokens": 32}
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(9)
    ]
    (tmp_path / "in").write_text("\n".join([*map(json.dumps, lines), "no json"]) + "\n")
    flags = ("--num-threads", "1", "--kv-cache-bytes", str(64 * 2**20), "--max-concurrency", "1")
    process = await started(tmp_path, *flags)
    while not (tmp_path / "out").exists() or not (tmp_path / "out").read_bytes():
        await asyncio.sleep(0.01)
    os.kill(process.pid, signal.SIGSTOP)
    batch = psutil.Process(process.pid)
    workers = batch.children()
    ports = listening(batch)
    os.kill(process.pid, signal.SIGCONT)
    process.send_signal(signal.SIGINT)
    _, errors = await asyncio.wait_for(process.communicate(), 100)
    assert len(ports) == 1, "only its workers can connect to it"
    assert process.returncode == 130
    assert b"stopped. 10 lines: " in errors
    assert workers
    assert not any(worker.is_running() for worker in workers)
    process = await started(tmp_path, *flags)
    _, errors = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 1
    found = [json.loads(one) for one in (tmp_path / "out").read_text().splitlines()]
    assert [one["error"]["line"] for one in found if one["error"]] == [10]
    texts = {one["response"]["body"]["choices"][0]["text"] for one in found if one["response"]}
    assert (len(found), len(texts)) == (10, 1)
