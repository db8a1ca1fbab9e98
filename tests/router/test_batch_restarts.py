"""Batches survive the end of their router: an orderly stop, a torn last line, kill -9, and a restart after their window."""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from contract.identity import Role
from protos import worker_pb2 as pb
from tests.chaos.settings import process_environment
from tests.fakes.router.script import Script
from tests.router.batch_cluster import (
    ABC,
    STUCK,
    batch_over,
    batch_when,
    call,
    create,
    filing_cluster,
    jsonl,
    lines_of,
    request_line,
)
from tests.text.tiny_model import byte_ids

DAY = 24 * 3600


class Seen:
    """Returns a script, and records the first character of every prompt."""

    def __init__(self, script: Script = ABC, stuck_after: int | None = None) -> None:
        self.prompts: list[int] = []
        self._script, self._stuck_after = script, stuck_after

    def __call__(self, task: pb.Task) -> Script:
        self.prompts.append(task.prompt_token_ids[0])
        if self._stuck_after is not None and len(self.prompts) > self._stuck_after:
            return STUCK
        return self._script


def letters(number: int) -> bytes:
    """Return an input file with ``number`` requests, each with its own prompt."""
    return jsonl(*(request_line(f"r{i}", prompt=chr(ord("a") + i)) for i in range(number)))


def prompts_of(number: int) -> list[int]:
    return byte_ids(bytes(range(ord("a"), ord("a") + number)))


async def test_a_restart_continues_with_requests_without_a_line(tmp_path: Path) -> None:
    before = Seen(stuck_after=3)
    async with filing_cluster(tmp_path, before, batches_max_concurrency=2) as cluster:
        made = await create(cluster, letters(8))
        await batch_when(cluster, made["id"], lambda batch: batch["request_counts"]["completed"] == 3)
        await cluster.until(lambda state: state["requests"]["streaming"] == 2)
    after = Seen()
    async with filing_cluster(tmp_path, after) as cluster:
        batch = await batch_over(cluster, made["id"])
        lines = await lines_of(cluster, batch["output_file_id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
    assert sorted(line["custom_id"] for line in lines) == [f"r{i}" for i in range(8)]
    assert len(before.prompts) == 5
    assert sorted(before.prompts[:3] + after.prompts) == prompts_of(8)


@pytest.mark.parametrize(
    "torn",
    [
        b'{"id":"batch_req_1","custom_id":"r7","respon',
        b"\x00" * 4096,
        b"{}\n",
        b"\xff\n",
        b'{"custom_id":"r7"}',
    ],
)
async def test_a_torn_tail_is_cut_off_and_computed_again(tmp_path: Path, torn: bytes) -> None:
    async with filing_cluster(tmp_path, Seen(stuck_after=3), batches_max_concurrency=1) as cluster:
        made = await create(cluster, letters(8))
        await batch_when(cluster, made["id"], lambda batch: batch["request_counts"]["completed"] == 3)
    record = json.loads((tmp_path / f"{made['id']}.json").read_text())
    with (tmp_path / f"{record['output_file_id']}.data").open("ab") as results:
        results.write(torn)
    after = Seen()
    async with filing_cluster(tmp_path, after) as cluster:
        batch = await batch_over(cluster, made["id"])
        lines = await lines_of(cluster, batch["output_file_id"])
    assert batch["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
    assert sorted(line["custom_id"] for line in lines) == [f"r{i}" for i in range(8)]
    assert sorted(after.prompts) == prompts_of(8)[3:]


async def test_a_batch_that_is_late_when_its_router_is_back_expires(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, Seen(stuck_after=3), batches_max_concurrency=1) as cluster:
        made = await create(cluster, letters(5))
        await batch_when(cluster, made["id"], lambda batch: batch["request_counts"]["completed"] == 3)
    after = Seen()
    async with filing_cluster(tmp_path, after, clock=lambda: time.time() + DAY + 60) as cluster:
        batch = await batch_over(cluster, made["id"])
        outputs = await lines_of(cluster, batch["output_file_id"])
        errors = await lines_of(cluster, batch["error_file_id"])
        metrics = await cluster.metrics()
    assert batch["status"] == "expired"
    assert batch["expired_at"] >= batch["finalizing_at"] >= batch["expires_at"]
    assert batch["request_counts"] == {"total": 5, "completed": 3, "failed": 2}
    assert [line["custom_id"] for line in outputs] == ["r0", "r1", "r2"]
    assert [line["custom_id"] for line in errors] == ["r3", "r4"]
    assert {(line["response"], line["error"]["code"]) for line in errors} == {(None, "batch_expired")}
    assert after.prompts == []
    assert metrics['kvbaton_batch_requests_total{result="expired"}'] == 2


async def test_a_batch_that_runs_into_its_window_expires(tmp_path: Path) -> None:
    offset = 0.0

    async with filing_cluster(tmp_path, STUCK, clock=lambda: time.time() + offset) as cluster:
        made = await create(cluster, letters(1))
        await cluster.until(lambda state: state["requests"]["streaming"] == 1)
        offset = DAY + 60.0
    async with filing_cluster(tmp_path, STUCK, clock=lambda: time.time() + offset) as cluster:
        batch = await batch_over(cluster, made["id"])
    assert (batch["status"], batch["request_counts"]["failed"]) == ("expired", 1)


async def test_files_and_batches_are_kept_no_longer_than_retention(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, files_retention_seconds=3600) as cluster:
        made = await create(cluster, letters(2))
        await batch_over(cluster, made["id"])
        _, files = await call(cluster, "GET", "/v1/files")
        assert len(files["data"]) == 2
    later = time.time() + 3700
    async with filing_cluster(
        tmp_path, roles=(), clock=lambda: later, files_retention_seconds=3600
    ) as cluster:
        assert (await call(cluster, "GET", "/v1/files"))[1]["data"] == []
        assert (await call(cluster, "GET", "/v1/batches"))[1]["data"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from protos import worker_pb2 as pb
from tests.fakes.router.script import Script
from tests.router.batch_cluster import ABC, create, filing_cluster
from tests.router.test_batch_restarts import letters

async def main(folder, log, batch_id):
    def script(task):
        with open(log, "a") as seen:
            seen.write(f"{task.prompt_token_ids[0]}\\n")
        return Script(tokens=ABC.tokens, token_delay_seconds=0.002)
    async with filing_cluster(Path(folder), script, batches_max_concurrency=2) as cluster:
        if not batch_id:
            batch_id = (await create(cluster, letters(26)))["id"]
        print(batch_id, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
async def test_kill_9_at_any_moment_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """A router is killed repeatedly while its batch runs; each request has one line in the end."""
    folder, log = tmp_path / "files", tmp_path / "prompts"
    log.touch()
    batch_id, num_seen = "", 0
    for kill in range(4):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, str(folder), str(log), batch_id),
            stdout=asyncio.subprocess.PIPE,
            env=process_environment(),
        )
        try:
            assert process.stdout
            batch_id = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
            assert batch_id.startswith("batch_")
            wanted = min(num_seen + 4 + kill, 26)
            async with asyncio.timeout(60):
                while len(log.read_text().splitlines()) < wanted:
                    await asyncio.sleep(0.001)
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        num_seen = len(log.read_text().splitlines())
    last = Seen()
    async with filing_cluster(folder, last, (Role.AGGREGATED,)) as cluster:
        batch = await batch_over(cluster, batch_id)
        lines = await lines_of(cluster, batch["output_file_id"])
    assert batch["request_counts"] == {"total": 26, "completed": 26, "failed": 0}
    assert sorted(line["custom_id"] for line in lines) == sorted(f"r{i}" for i in range(26))
    asked: list[Any] = [int(token) for token in log.read_text().split()] + last.prompts
    repeated = len(asked) - 26
    assert 0 <= repeated <= 2 * 4  # at most what ran at each of the kills
