"""The ``openai`` package as a client of files and batches."""

import json
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI

from tests.router.batch_cluster import (
    ABC,
    CHAT,
    STUCK,
    TEXT,
    batch_over,
    filing_cluster,
    jsonl,
    prompts,
    request_line,
)
from tests.router.cluster import Cluster


def sdk(cluster: Cluster, api_key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=cluster.url("/v1"), api_key=api_key, max_retries=0)


async def test_the_sdk_runs_a_batch_from_upload_to_results(tmp_path: Path) -> None:
    source = tmp_path / "questions.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    source.write_bytes(
        jsonl(
            request_line("good", CHAT, messages=messages), request_line("bad", CHAT, messages=messages, n=0)
        )
    )
    async with filing_cluster(tmp_path / "files", ABC) as cluster, sdk(cluster) as client:
        file = await client.files.create(
            file=source, purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
        )
        assert (file.filename, file.purpose, file.bytes) == (
            "questions.jsonl",
            "batch",
            source.stat().st_size,
        )
        assert file.expires_at == file.created_at + 7200
        batch = await client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"run": "7"},
            output_expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"run": "7"})
        await batch_over(cluster, batch.id)
        batch = await client.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert batch.request_counts
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
            2,
            1,
            1,
        )
        assert batch.output_file_id and batch.error_file_id
        output = json.loads((await client.files.content(batch.output_file_id)).text)
        assert output["response"]["body"]["choices"][0]["message"]["content"] == "abc"
        error = json.loads((await client.files.content(batch.error_file_id)).text)
        assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
        assert [one.id async for one in client.batches.list(limit=1)] == [batch.id]
        names = [one.id async for one in client.files.list(limit=1, order="asc")]
        assert names == [file.id, batch.output_file_id, batch.error_file_id]
        assert (await client.files.retrieve(names[1])).purpose == "batch_output"
        for name in names:
            assert (await client.files.delete(name)).deleted
        assert [one.id async for one in client.files.list()] == []


async def test_the_sdk_cancels_a_batch_and_reads_its_errors(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, STUCK) as cluster, sdk(cluster) as client:

        async def begun(content: bytes) -> str:
            file = await client.files.create(file=("in.jsonl", content), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            return batch.id

        running = await begun(prompts(1))
        await cluster.until(lambda state: state["requests"]["streaming"] == 1)
        assert (await client.batches.cancel(running)).status in ("cancelling", "cancelled")
        await batch_over(cluster, running)
        assert (await client.batches.retrieve(running)).status == "cancelled"

        wrong = await begun(jsonl(request_line("a", TEXT)) + b"\n")
        await batch_over(cluster, wrong)
        failed = await client.batches.retrieve(wrong)
        assert failed.status == "failed"
        assert failed.errors and failed.errors.data
        assert [(one.code, one.line) for one in failed.errors.data] == [("invalid_json_line", 2)]


async def test_errors_are_the_sdks_own(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, api_keys="a,b") as cluster, sdk(cluster, "a") as client:
        file = await client.files.create(file=("in.jsonl", b"x"), purpose="batch")
        with pytest.raises(openai.BadRequestError) as purpose:
            await client.files.create(file=("in.jsonl", b"x"), purpose="assistants")
        assert purpose.value.param == "purpose"
        async with sdk(cluster, "b") as other:
            with pytest.raises(openai.NotFoundError):
                await other.files.retrieve(file.id)
            with pytest.raises(openai.NotFoundError):
                await other.files.content(file.id)
            assert [one.id async for one in other.files.list()] == []
