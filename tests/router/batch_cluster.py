"""A cluster whose router keeps files, and the calls of a client of files and batches."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from contract.identity import Role
from tests.fakes.router.script import Script, Writer
from tests.router.cluster import Cluster, running_cluster
from tests.text.tiny_model import END, byte_ids

ABC = Script(tokens=[*byte_ids(b"abc"), END])
STUCK = Script(tokens=ABC.tokens, stall_at=1)
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
OVER = ("completed", "failed", "cancelled", "expired")


@asynccontextmanager
async def filing_cluster(
    folder: Path, script: Script | Writer = ABC, roles: tuple[Role, ...] = (Role.AGGREGATED,), **settings: Any
) -> AsyncIterator[Cluster]:
    """Run a cluster that keeps files in ``folder``."""
    async with running_cluster(script, roles, files_dir=folder, **settings) as cluster:
        yield cluster


def key(name: str) -> dict[str, str]:
    """Return the headers of a client with this API key."""
    return {"Authorization": f"Bearer {name}"}


async def call(
    cluster: Cluster, method: str, path: str, headers: Mapping[str, str] | None = None, **options: Any
) -> tuple[int, Any]:
    """Send one request; return status and body."""
    async with cluster.session.request(method, cluster.url(path), headers=headers, **options) as response:
        return response.status, await response.json()


def form(
    content: bytes, purpose: str | None = "batch", name: str = "in.jsonl", **fields: str
) -> aiohttp.FormData:
    """Return the form of an upload."""
    data = aiohttp.FormData(fields, quote_fields=False)
    if purpose is not None:
        data.add_field("purpose", purpose)
    data.add_field("file", content, filename=name, content_type="application/octet-stream")
    return data


async def upload(cluster: Cluster, content: bytes, headers: Mapping[str, str] | None = None) -> str:
    """Upload a file for a batch and return its id."""
    status, file = await call(cluster, "POST", "/v1/files", headers, data=form(content))
    assert status == 200, file
    return str(file["id"])


async def content_of(cluster: Cluster, file_id: str, headers: Mapping[str, str] | None = None) -> bytes:
    """Return the content of a file."""
    async with cluster.session.get(cluster.url(f"/v1/files/{file_id}/content"), headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.read()


async def lines_of(
    cluster: Cluster, file_id: str | None, headers: Mapping[str, str] | None = None
) -> list[Any]:
    """Return the lines of a result file; none if there is no file."""
    if file_id is None:
        return []
    return [json.loads(line) for line in (await content_of(cluster, file_id, headers)).splitlines()]


def request_line(custom_id: str, url: str = TEXT, **body: Any) -> dict[str, Any]:
    """Return a line of an input file."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "tiny", **body}}


def jsonl(*lines: Mapping[str, Any]) -> bytes:
    """Return an input file."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def prompts(number: int, first: int = 0, **body: Any) -> bytes:
    """Return an input file with ``number`` text completions, whose custom_ids are r0, r1, ..."""
    return jsonl(*(request_line(f"r{i}", prompt="x", **body) for i in range(first, first + number)))


async def create(
    cluster: Cluster,
    content: bytes,
    endpoint: str = TEXT,
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Upload an input and create its batch."""
    file_id = await upload(cluster, content, headers)
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", **fields}
    status, batch = await call(cluster, "POST", "/v1/batches", headers, json=body)
    assert status == 200, batch
    return dict(batch)


async def batch_when(
    cluster: Cluster,
    batch_id: str,
    is_true: Callable[[dict[str, Any]], object],
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Block until the condition holds for the batch, and return it."""
    async with asyncio.timeout(30):
        while True:
            status, batch = await call(cluster, "GET", f"/v1/batches/{batch_id}", headers)
            assert status == 200, batch
            if is_true(batch):
                return dict(batch)
            await asyncio.sleep(0.01)


async def batch_over(
    cluster: Cluster, batch_id: str, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Block until the batch is over, and return it."""
    return await batch_when(cluster, batch_id, lambda batch: batch["status"] in OVER, headers)
