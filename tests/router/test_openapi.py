"""The OpenAPI document describes what the router does; schemathesis tests a running one against it."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from contract.identity import Role
from contract.sampling import PARAMETERS
from router.http.bodies.body import UNSERVED, Body
from router.http.fields.chat import CHAT_FIELDS
from router.http.fields.unsupported import NEUTRAL
from router.http.openapi import document
from router.http.responses.parser import RESPONSE_NEUTRAL
from router.http.schema.chat import CHAT, DETOKENIZE, TOKENIZE
from router.http.schema.completion import COMPLETION
from router.http.schema.files import BATCH, UPLOAD
from router.http.schema.responses import RESPONSE
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.text.tiny_model import END, byte_ids

ANSWER = Script(tokens=[*byte_ids("añ".encode()), END])
KEY = "sk-door"
HTTP = Path(__file__).parents[2] / "router" / "http"
NOT_CHECKED = "positive_data_acceptance"
"""Values that are allowed one by one may not fit together, or not fit the model's vocabulary and length."""


async def described(cluster: Cluster) -> dict[str, Any]:
    status, document = await cluster.get("/openapi.json")
    assert status == 200
    return dict(document)


async def test_every_path_is_described_and_none_more() -> None:
    async with running_cluster(ANSWER, ()) as cluster:
        document = await described(cluster)
        app = cluster.service._public.http._app
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
    assert set(paths) - closed == {"/", "/docs", "/health", "/ping", "/ready", "/version"}


async def test_every_timing_of_an_answer_is_described() -> None:
    """Each is a number that is always there, whether it is measured or a sum."""
    async with running_cluster(ANSWER, (Role.AGGREGATED,)) as cluster:
        schema = (await described(cluster))["components"]["schemas"]["ChatCompletion"]
        body = {"messages": [{"role": "user", "content": "a"}], "timings": True}
        _, answer = await cluster.post("/v1/chat/completions", body)
    timings = schema["properties"]["kvbaton"]["properties"]["timings"]
    assert {*answer["kvbaton"]["timings"]} == {*timings["properties"]} == {*timings["required"]}


SCHEMAS = {
    "CHAT": CHAT,
    "COMPLETION": COMPLETION,
    "RESPONSE": RESPONSE,
    "TOKENIZE": TOKENIZE,
    "DETOKENIZE": DETOKENIZE,
    "BATCH": BATCH,
    "UPLOAD": UPLOAD,
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_described_field_is_read(name: str) -> None:
    """Its name occurs in code other than the schema. ``Body`` rejects reading a field that is not described.

    Readers of sampling parameters come from the table from which the schema comes.
    """
    describing = {*(HTTP / "schema").glob("*.py"), HTTP / "openapi.py"}
    sources = [path.read_text() for path in HTTP.rglob("*.py") if path not in describing]
    derived = {parameter.name for parameter in PARAMETERS if parameter.meaning}
    for field in SCHEMAS[name]["properties"].keys() - derived:
        assert any(f'"{field}"' in source for source in sources), field


def test_a_field_is_supported_or_rejected() -> None:
    for described_, served in ((CHAT, CHAT_FIELDS), (COMPLETION, ())):
        unserved = {name for name, field in described_["properties"].items() if UNSERVED in field}
        assert unserved == NEUTRAL.keys() - set(served)
    rejected = {name for name, field in RESPONSE["properties"].items() if UNSERVED in field}
    assert rejected == RESPONSE_NEUTRAL.keys()


def test_the_document_has_no_field_that_is_rejected() -> None:
    """They are known by name to the router alone."""
    found = document("1", needs_key=False, metrics_need_key=False)
    bodies = [
        path["post"]["requestBody"]
        for path in found["paths"].values()
        if "requestBody" in path.get("post", {})
    ]
    assert len(bodies) > 6 and UNSERVED not in json.dumps(bodies)
    (chat,) = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"].values()
    assert {"messages", "tools", "top_k"} <= chat["schema"]["properties"].keys()
    assert "audio" not in chat["schema"]["properties"]


@pytest.mark.parametrize("name", ["nothing", "tools"])
def test_a_field_that_is_not_described_cannot_be_read(name: str) -> None:
    with pytest.raises(LookupError, match="does not describe it"):
        Body({name: 1}, {"properties": {"tools": {UNSERVED: True}, "n": {}}}).get(name)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("strict", "num_examples", "phases"), [(False, 50, "examples,coverage,fuzzing"), (True, 10, "fuzzing")]
)
async def test_schemathesis_finds_nothing(
    strict: bool, num_examples: int, phases: str, tmp_path: Path
) -> None:
    """With strict_api only unknown fields are treated in another way, for which the same values need no second run."""
    async with running_cluster(
        ANSWER, (Role.AGGREGATED,), api_keys=KEY, strict_api=strict, files_dir=tmp_path / "files"
    ) as cluster:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", cluster.url("/openapi.json")),
            *("--header", f"Authorization: Bearer {KEY}", "--max-examples", str(num_examples), "--seed", "5"),
            *("--phases", phases, "--exclude-checks", NOT_CHECKED),
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
