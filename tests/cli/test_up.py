"""``kvbaton up``, ``run`` and ``demo`` as processes, on a tiny random model."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import trustme

from cli.ask import Answer, ask_http
from cli.endpoint import Endpoint
from tests.certificates import write_certificate
from tests.checkpoints import make_checkpoint
from tests.launch.children import wait_gone
from tests.private_files import write_private

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

FREE_PORTS = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a prefill worker, which is nicer than others, starts for longer than requests wait by default."""
    monkeypatch.setenv("KVBATON_WORKER_WAIT_SECONDS", "120")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


class Command:
    """A running ``kvbaton`` whose lines a test can wait for."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def wait_for(self, pattern: str) -> str:
        """Read until a line matches."""
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            self.lines.append(raw.decode())
            if re.search(pattern, self.lines[-1]):
                return self.lines[-1]
        raise AssertionError(f"it ended without {pattern!r}:\n{''.join(self.lines)}")

    async def end(self, number: signal.Signals) -> int:
        """Send a signal, read to the end and return the exit code."""
        self.process.send_signal(number)
        rest, _ = await self.process.communicate()
        self.lines += rest.decode().splitlines(keepends=True)
        assert self.process.returncode is not None
        return self.process.returncode


@asynccontextmanager
async def kvbaton(*arguments: str) -> AsyncIterator[Command]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield Command(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def read(ready_file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(ready_file.read_text())
    return content


async def complete(ready: dict[str, Any]) -> Answer:
    body = {"model": "tiny", "prompt": "one two three", "max_tokens": 8, "temperature": 0}
    return await ask_http(Endpoint(f"http://{ready['http']}"), "completions", body)


def family(pid: int) -> list[int]:
    """Return a process and all of its descendants, engines included."""
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]


async def test_a_killed_worker_comes_back_and_nothing_survives_the_supervisor(
    model: Path, tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready.json"
    flags = ("--model", str(model), "--served-model-name", "tiny", "--ready-file", str(ready_file))
    async with kvbaton("up", *FREE_PORTS, *flags) as command:
        await command.wait_for("kvbaton is ready")
        before = read(ready_file)
        assert [process["role"] for process in before["processes"]] == ["router", "prefill", "decode"]
        answer = await complete(before)
        engine = family(before["processes"][2]["pid"])
        os.kill(engine[0], signal.SIGKILL)
        await command.wait_for("decode-0 ended")
        assert all(wait_gone(pid) for pid in engine)
        await command.wait_for("decode-0 ready")
        after = read(ready_file)
        assert (after["http"], after["processes"][:2]) == (before["http"], before["processes"][:2])
        assert after["processes"][2]["pid"] != before["processes"][2]["pid"]
        assert (await complete(after)).text == answer.text
        everybody = family(command.process.pid)
        assert len(everybody) >= 6
        await command.end(signal.SIGKILL)
        assert all(wait_gone(pid) for pid in everybody)


async def test_a_service_that_scales_is_ready_without_measuring_and_decides(
    model: Path, tmp_path: Path
) -> None:
    """Ready means ready: no request of its own runs, and the decisions begin with a guess of the times."""
    ready_file = tmp_path / "ready.json"
    flags = ("--autoscale", "--prefill", "1:2", "--decode", "1:2", "--ready-file", str(ready_file))
    async with kvbaton("up", *FREE_PORTS, *flags, "--model", str(model)) as command:
        await command.wait_for("kvbaton is ready")
        router = read(ready_file)["processes"][0]
        async with aiohttp.ClientSession() as session:
            for _ in range(60):
                async with session.get(f"http://{router['admin']}/metrics") as reply:
                    metrics = await reply.text()
                if 'kvbaton_desired_workers{pool="decode"} 1' in metrics:
                    break
                await asyncio.sleep(1)
            else:
                raise AssertionError("no decision of the autoscaler has arrived")
        assert "kvbaton_requests_admitted_total 0.0" in metrics
        assert [line for line in command.lines if "measuring the service" in line] == []
        assert await command.end(signal.SIGINT) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_stops_an_aggregated_service_cleanly(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """A1: ``serve <model>`` logs version, settings and a ready line; Ctrl-C stops it."""
    ready_file = tmp_path / "ready.json"
    flags = ("--served-model-name", "tiny", "--ready-file", str(ready_file))
    async with kvbaton("serve", str(model), *FREE_PORTS, *flags) as command:
        await command.wait_for("kvbaton 0")
        await command.wait_for("settings: .*max_num_seqs=")
        await command.wait_for("kvbaton is ready")
        assert [process["role"] for process in read(ready_file)["processes"]] == ["router", "both"]
        assert (await complete(read(ready_file))).num_completion_tokens == 8
        everybody = family(command.process.pid)
        assert await command.end(number) == 0
        assert all(wait_gone(pid) for pid in everybody)
    assert not ready_file.exists()
    assert [line for line in command.lines if "ERROR" in line or "Traceback" in line] == []


async def test_run_answers_once(model: Path) -> None:
    async with kvbaton("run", "one two", "--model", str(model), "--max-tokens", "4") as command:
        output, _ = await command.process.communicate()
    assert command.process.returncode == 0, output.decode()
    assert output.strip()


async def test_run_and_demo_send_a_key_to_the_service_that_they_start_and_demo_uses_tls(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    write_private(keys, "in-file\n")
    monkeypatch.setenv("KVBATON_API_KEYS_FILE", str(keys))
    monkeypatch.setenv("KVBATON_API_KEY", "of-another-service")
    async with kvbaton(
        "run", "one two", "--model", str(model), "--max-tokens", "4", "--both", "1"
    ) as command:
        output, _ = await command.process.communicate()
    assert command.process.returncode == 0, output.decode()
    certificate, key = write_certificate(trustme.CA(), tmp_path, "example.org")
    monkeypatch.setenv("KVBATON_TLS_CERTIFICATE_FILE", str(certificate))
    monkeypatch.setenv("KVBATON_TLS_KEY_FILE", str(key))
    async with kvbaton("demo", *FREE_PORTS, "--model", str(model)) as command:
        await command.wait_for("Latency in ms")
        await command.wait_for("-k -H 'Authorization: Bearer KEY'")
        assert await command.end(signal.SIGINT) == 0
    assert "in-file" not in "".join(command.lines)


async def test_a_service_with_tls_prints_an_https_url_and_run_trusts_its_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = write_certificate(trustme.CA(), tmp_path, "example.org")
    monkeypatch.setenv("KVBATON_TLS_CERTIFICATE_FILE", str(certificate))
    monkeypatch.setenv("KVBATON_TLS_KEY_FILE", str(key))
    async with kvbaton("up", *FREE_PORTS, "--model", str(model), "--both", "1") as command:
        assert "OpenAI API https://127.0.0.1:" in await command.wait_for("kvbaton is ready")
        assert await command.end(signal.SIGTERM) == 0
    async with kvbaton(
        "run", "one two", "--model", str(model), "--max-tokens", "4", "--both", "1"
    ) as command:
        output, _ = await command.process.communicate()
    assert command.process.returncode == 0, output.decode()


async def test_chat_starts_its_own_service_by_a_file_and_leaves_nothing_behind(
    model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "kvbaton.toml"
    file.write_text(
        f'model = "{model}"\n[chat]\nmax_tokens = 4\nlog_level = "info"\n[decode]\nmax_num_seqs = 3\n'
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", "chat", "--config", str(file)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate(b"one two\n/stats\n")
    assert process.returncode == 0, errors.decode()
    assert "4 out (length)" in output.decode()
    assert re.search(
        r"decode-0 worker.service: settings: .*max_num_seqs=3 \(KVBATON_MAX_NUM_SEQS\)", errors.decode()
    )
    assert all(wait_gone(int(pid)) for pid in re.findall(r"started \(pid (\d+)\)", errors.decode()))


async def test_demo_shows_two_answers_and_their_latency_breakdown(model: Path) -> None:
    async with kvbaton("demo", *FREE_PORTS, "--model", str(model)) as command:
        await command.wait_for("OpenAI HTTP question:")
        await command.wait_for("gRPC Generate question:")
        await command.wait_for("Latency in ms")
        await command.wait_for("kvbaton is ready")
        assert await command.end(signal.SIGINT) == 0
    assert command.lines[-1] == "kvbaton: stopped\n"


async def test_a_worker_that_cannot_start_ends_up_and_is_named(model: Path) -> None:
    flags = ("--model", str(model), "--both", "1", "--kv-cache-bytes", "1")
    async with kvbaton("up", *FREE_PORTS, *flags) as command:
        output, _ = await command.process.communicate()
    assert command.process.returncode == 1
    last = output.decode().splitlines()[-1]
    assert "kvbaton: both-0 could not start: it ended before it was ready: " in last
    assert "there are 1 bytes for the KV cache" in last


async def test_a_pool_grows_with_the_load(model: Path, tmp_path: Path) -> None:
    """The timing file claims that a prompt takes half a second, so that a few requests need more workers."""
    timing = {
        "prefill": {"base_seconds": 0.5, "seconds_per_token": 0.0},
        "decode": [{"base_seconds": 0.01, "seconds_per_context_token": 0.0, "seconds_per_answer": 0.001}],
        "kv_tokens": 1000,
        "max_answers": 8,
        "start_seconds": 120.0,
    }
    (tmp_path / "timing.json").write_text(json.dumps(timing))
    ready_file = tmp_path / "ready.json"
    flags = ("--model", str(model), "--served-model-name", "tiny", "--ready-file", str(ready_file))
    scaled = ("--autoscale", "--prefill", "1:2", "--decode", "1", "--timing", str(tmp_path / "timing.json"))
    async with kvbaton("up", *FREE_PORTS, *flags, *scaled) as command:
        await command.wait_for("kvbaton is ready")
        ready = read(ready_file)

        async def ask() -> None:
            while True:
                await complete(ready)
                await asyncio.sleep(0.1)

        asking = asyncio.create_task(ask())
        try:
            await command.wait_for(r"autoscaler.controller: prefill 1\S+2 ")
            await command.wait_for("prefill-1 ready")
        finally:
            asking.cancel()
            await asyncio.wait({asking})
        assert asking.cancelled()
        names = [process["name"] for process in read(ready_file)["processes"]]
        assert names == ["router", "prefill-0", "decode-0", "prefill-1"]
        everybody = family(command.process.pid)
        assert await command.end(signal.SIGTERM) == 0
        assert all(wait_gone(pid) for pid in everybody)
