"""The description of the HTTP API says what the router does: schemathesis asks a running one."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from contract.identity import Role
from router.http import batch_schema, schema
from router.http.body import UNSERVED, Body
from router.http.chat_fields import CHAT_FIELDS
from router.http.fields import NEUTRAL
from router.http.response_fields import RESPONSE_NEUTRAL
from router.testing import Script
from tests.router.cluster import Cluster, running_cluster
from tests.text.tiny_model import END, byte_ids

ANSWER = Script(tokens=[*byte_ids("añ".encode()), END])
KEY = "sk-door"
HTTP = Path(__file__).parents[2] / "router" / "http"
NOT_CHECKED = "positive_data_acceptance"
"""What the fields allow one by one may still not fit together, or not fit the model's vocabulary and length."""


async def described(cluster: Cluster) -> dict[str, Any]:
    status, document = await cluster.get("/openapi.json")
    assert status == 200
    return dict(document)


async def test_every_path_is_described_and_none_more() -> None:
    async with running_cluster(ANSWER, ()) as cluster:
        document = await described(cluster)
        app = cluster.service._http.runner.app  # type: ignore[union-attr]
    served = {
        (route.resource.canonical, route.method.lower())
        for route in app.router.routes()
        if route.resource and route.method != "HEAD"
    }
    found = {(path, method) for path, operations in document["paths"].items() for method in operations}
    assert found == served


async def test_keys_are_described_where_they_are_needed() -> None:
    async with running_cluster(ANSWER, ()) as cluster:
        paths = (await described(cluster))["paths"]
        assert not any("security" in operation for item in paths.values() for operation in item.values())
    async with running_cluster(ANSWER, (), api_keys=KEY) as cluster:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with cluster.session.get(cluster.url("/openapi.json"), headers=headers) as response:
            paths = (await response.json())["paths"]
    closed = {path for path, item in paths.items() if any("security" in each for each in item.values())}
    assert set(paths) - closed == {"/health", "/ready", "/version", "/metrics"}


SCHEMAS = {
    name: getattr(schema, name) for name in ("CHAT", "COMPLETION", "RESPONSE", "TOKENIZE", "DETOKENIZE")
}
SCHEMAS |= {"BATCH": batch_schema.BATCH, "UPLOAD": batch_schema.UPLOAD}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_described_field_is_read(name: str) -> None:
    """By its name in the code beside the description; what is read and not described, ``Body`` refuses."""
    describing = ("schema.py", "batch_schema.py", "openapi.py")
    sources = [path.read_text() for path in HTTP.glob("*.py") if path.name not in describing]
    for field in SCHEMAS[name]["properties"]:
        assert any(f'"{field}"' in source for source in sources), field


def test_a_field_is_served_or_refused() -> None:
    for described_, served in ((schema.CHAT, CHAT_FIELDS), (schema.COMPLETION, ())):
        unserved = {name for name, field in described_["properties"].items() if UNSERVED in field}
        assert unserved == NEUTRAL.keys() - set(served)
    refused = {name for name, field in schema.RESPONSE["properties"].items() if UNSERVED in field}
    assert refused == RESPONSE_NEUTRAL.keys()


@pytest.mark.parametrize("name", ["nothing", "tools"])
def test_a_field_that_is_not_described_cannot_be_read(name: str) -> None:
    with pytest.raises(LookupError, match="does not describe it"):
        Body({name: 1}, {"properties": {"tools": {UNSERVED: True}, "n": {}}}).get(name)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
async def test_schemathesis_finds_nothing(strict: bool, tmp_path: Path) -> None:
    async with running_cluster(
        ANSWER, (Role.AGGREGATED,), api_keys=KEY, strict_api=strict, files_dir=tmp_path / "files"
    ) as cluster:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", cluster.url("/openapi.json")),
            *("--header", f"Authorization: Bearer {KEY}", "--max-examples", "50", "--seed", "5"),
            *("--phases", "examples,coverage,fuzzing", "--exclude-checks", NOT_CHECKED),
            *("--request-timeout", "20", "--continue-on-failure", "--no-color"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            told, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, told.decode()
        await cluster.until(lambda state: not any(state["requests"].values()))
