"""Requests to a service before any question: for its pages, for its load, and whether a body may come."""

import asyncio
import json
from typing import Any

import pytest
from grpc_reflection.v1alpha import reflection_pb2

from contract.errors import SettingError
from contract.identity import Role
from router.client_access import client_access
from router.settings import RouterSettings
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.router.test_ends import TEXT, TOKENS

STALLED = Script(tokens=TOKENS, stall_at=1)
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


async def test_a_browser_gets_pages_that_load_nothing_from_elsewhere() -> None:
    async with running_cluster(STALLED, (Role.AGGREGATED,), api_keys="a-key") as cluster:
        for path, text in (("/", "/openapi.json"), ("/docs", "/v1/chat/completions")):
            async with cluster.session.get(
                cluster.url(path), headers={"Accept": "text/html,*/*"}
            ) as response:
                page = await response.text()
                assert (response.status, response.content_type) == (200, "text/html")
                assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            assert text in page and "://" not in page and "<script" not in page
        status, answer = await cluster.get("/")
    assert (status, answer["name"]) == (200, "kvbaton") and "/docs" in answer["paths"]


async def test_ping_and_load() -> None:
    async with running_cluster(STALLED, (Role.AGGREGATED,)) as cluster:
        assert (await cluster.get("/ping"))[0] == 200
        assert (await cluster.get("/load"))[1] == {"server_load": 0}
        asking = asyncio.create_task(cluster.post(TEXT, {"prompt": "x"}))
        await cluster.until(lambda state: state["requests"]["streaming"] == 1)
        assert (await cluster.get("/load"))[1] == {"server_load": 1}
        asking.cancel()
        await cluster.workers["both-0"].stop()
        await cluster.until(lambda state: not state["workers"])
        assert (await cluster.get("/ping"))[0] == 503


async def test_reflection_has_its_final_name_too() -> None:
    async with running_cluster(STALLED, (Role.AGGREGATED,)) as cluster, cluster.channel() as channel:
        call = channel.stream_stream(
            REFLECTION,
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer: Any = await call.read()
        names = {service.name for service in answer.list_services_response.service}
    assert {"kvbaton.v1.Inference", "grpc.reflection.v1.ServerReflection"} <= names


async def head_of(
    cluster: Cluster, path: str, length: int, headers: str = "", body: bytes = b""
) -> list[bytes]:
    """Send the head of a POST that asks before its body, and return the first lines of the answers."""
    host, port = cluster.service.addresses.http.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\nExpect: 100-continue\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n{headers}\r\n".encode())
    lines: list[bytes] = []
    async with asyncio.timeout(20):
        lines.append(await reader.readline())
        if b" 100 " in lines[0]:
            assert await reader.readline() == b"\r\n"
            writer.write(body)
            lines.append(await reader.readline())
    writer.close()
    return [line.split(b" ")[1] for line in lines]


async def test_a_body_that_is_rejected_anyway_is_not_asked_for() -> None:
    async with running_cluster(Script(tokens=TOKENS), (Role.AGGREGATED,), api_keys="a-key") as cluster:
        key = "Authorization: Bearer a-key\r\n"
        assert await head_of(cluster, TEXT, 10) == [b"401"]
        assert await head_of(cluster, TEXT, 2**30, key) == [b"413"]
        assert await head_of(cluster, "/v1/files", 2**40, key) != [b"100"]
        body = json.dumps({"prompt": "x"}).encode()
        assert await head_of(cluster, TEXT, len(body), key, body) == [b"100", b"200"]


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_variable_of_keys_opens_only_what_this_machine_reaches(
    empty: str, caplog: pytest.LogCaptureFixture
) -> None:
    local = RouterSettings(secret="s" * 32, api_keys=empty)
    assert not client_access(local).keys.are_required
    assert "api_keys (KVBATON_API_KEYS) is empty" in caplog.text
    for name in ("http", "grpc"):
        opened = local.model_copy(update={name: "0.0.0.0:8000"})
        with pytest.raises(SettingError, match="contains no key"):
            client_access(opened)
    with pytest.raises(SettingError, match="contains no key"):
        client_access(RouterSettings(secret="s" * 32, api_keys=" , "))
