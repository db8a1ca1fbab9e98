"""API keys, CORS and TLS of HTTP and gRPC, over real sockets."""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from contract.errors import SettingError
from contract.identity import Role
from protos import inference_pb2 as pb
from router.service import RouterService
from router.settings import RouterSettings
from tests.certificates import write_certificate
from tests.fakes.router.script import Script
from tests.private_files import write_private
from tests.router.cluster import SECRET, running_cluster
from tests.text.tiny_model import END, word_id

HELLO = Script(tokens=[word_id("hello"), END])
KEY = "sk-not-to-be-told"
GIVEN = {"Authorization": f"Bearer {KEY}"}
METADATA = (("authorization", f"Bearer {KEY}"),)
PAGE = "https://chat.example.org"


async def test_http_needs_a_key_but_for_the_open_paths(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running_cluster(HELLO, (Role.AGGREGATED,), api_keys=f"other,{KEY}") as cluster:
        for path in ("/health", "/ready", "/version"):
            async with cluster.session.get(cluster.url(path)) as response:
                assert response.status == 200, path
        for path in ("/v1/models", "/openapi.json", "/metrics", "/v1/nothing"):
            status, answer = await cluster.get(path)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), path
        url = cluster.url("/v1/completions")
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": KEY}):
            async with cluster.session.post(url, json={"prompt": "x"}, headers=headers) as response:
                assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
                error = (await response.json())["error"]
                assert error["type"] == "invalid_request_error"
                assert "sk-" not in error["message"]
        assert cluster.workers["both-0"].received.decodes == []
        status, answer = await cluster.post("/v1/completions", {"prompt": "x"}, headers=GIVEN)
        assert (status, answer["choices"][0]["text"]) == (200, "hello")
        state = await cluster.debug_state()
        for broken in (f"{KEY}\x00", f"{KEY}{'x' * 9000}"):
            await send_raw(cluster.service.addresses.http, f"Authorization: Bearer {broken}")
    assert KEY not in str(state)
    assert "Error handling request from 127.0.0.1: BadHttpMessage" in caplog.text
    assert KEY not in caplog.text


async def send_raw(address: str, header: str) -> None:
    """Send raw bytes that no client would send; return when they have been answered."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /version HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n".encode())
    assert b"400" in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_metrics_need_a_key_on_the_public_port_unless_they_are_opened() -> None:
    """They show the sizes of other clients' prompts and answers as these come."""
    async with running_cluster(HELLO, (), api_keys=KEY) as cluster:
        assert (await cluster.get("/metrics"))[0] == 401
        async with cluster.session.get(cluster.url("/metrics"), headers=GIVEN) as response:
            assert response.status == 200
        assert "kvbaton_num_requests_waiting" in await cluster.metrics()
    async with (
        running_cluster(HELLO, (), api_keys=KEY, metrics_need_key=False) as cluster,
        cluster.session.get(cluster.url("/metrics")) as response,
    ):
        assert response.status == 200


async def test_public_metrics_are_not_rendered_for_each_reader() -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:

        async def page() -> str:
            async with cluster.session.get(cluster.url("/metrics")) as response:
                return await response.text()

        async def is_sent_again() -> bool:
            before = await page()
            await cluster.post("/v1/completions", {"prompt": "x"})
            return await page() == before

        # On a slow machine a second may pass in between; a page that is rendered for each reader is never the same.
        assert any([await is_sent_again() for _ in range(5)])


async def test_a_key_can_be_taken_back_while_the_router_runs(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write_private(file, f"{KEY}\n")
    async with running_cluster(HELLO, (Role.AGGREGATED,), api_keys_file=file) as cluster:
        body = {"prompt": "x"}
        assert (await cluster.post("/v1/completions", body, headers=GIVEN))[0] == 200
        file.write_text("another\n")
        assert (await cluster.post("/v1/completions", body, headers=GIVEN))[0] == 401


async def test_grpc_needs_a_key_but_for_health() -> None:
    async with (
        running_cluster(HELLO, (Role.AGGREGATED,), api_keys=KEY) as cluster,
        cluster.channel() as channel,
    ):
        stub = cluster.inference(channel)
        request = pb.GenerateRequest(text="x")
        for metadata in ((), (("authorization", "Bearer sk-wrong"),)):
            for call in (
                stub.GenerateOnce(request, metadata=metadata),
                stub.Generate(request, metadata=metadata).read(),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
                assert "sk-" not in (caught.value.details() or "")
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status
        answer = await stub.GenerateOnce(request, metadata=METADATA)
        assert answer.choices[0].text == "hello"
        sync_typed: Any = channel
        listing: Any = reflection_pb2_grpc.ServerReflectionStub(sync_typed)
        ask = [reflection_pb2.ServerReflectionRequest(list_services="")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await listing.ServerReflectionInfo(iter(ask)).read()
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(("keys", "is_said"), [(None, True), (KEY, False)])
async def test_a_public_port_without_keys_is_logged_once(
    keys: str | None, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_cluster(HELLO, (), http="0.0.0.0:0", api_keys=keys):
        pass
    said = [record for record in caplog.records if "without an API key" in record.getMessage()]
    assert len(said) == is_said
    caplog.clear()
    async with running_cluster(HELLO, ()):
        assert "without an API key" not in caplog.text


def preflight(origin: str) -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }


async def test_a_page_of_an_allowed_origin_may_call() -> None:
    origins = f"http://localhost:3000, {PAGE}"
    async with running_cluster(HELLO, (Role.AGGREGATED,), cors_origins=origins, api_keys=KEY) as cluster:
        url = cluster.url("/v1/completions")
        async with cluster.session.options(url, headers=preflight(PAGE)) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            assert "x-stainless-lang" in response.headers["Access-Control-Allow-Headers"]
        for body, headers, status in (
            ({"prompt": "x"}, GIVEN, 200),
            ({"prompt": "x", "stream": True}, GIVEN, 200),
            ({"prompt": 7}, GIVEN, 400),
            ({"prompt": "x"}, {}, 401),
        ):
            async with cluster.session.post(url, json=body, headers={"Origin": PAGE, **headers}) as response:
                assert response.status == status
                assert response.headers["Access-Control-Allow-Origin"] == PAGE
                assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
                assert response.headers["Vary"] == "Origin"


@pytest.mark.parametrize(
    ("allowed", "origin", "answer"),
    [("", PAGE, None), ("https://other.org", PAGE, None), ("*", PAGE, "*"), ("*", None, None)],
)
async def test_other_origins_get_no_headers(allowed: str, origin: str | None, answer: str | None) -> None:
    async with running_cluster(HELLO, (), cors_origins=allowed) as cluster:
        headers = {"Origin": origin} if origin else {}
        async with cluster.session.get(cluster.url("/version"), headers=headers) as response:
            assert response.headers.get("Access-Control-Allow-Origin") == answer
        asking = preflight(origin or PAGE) if origin else {"Access-Control-Request-Method": "POST"}
        async with cluster.session.options(cluster.url("/v1/completions"), headers=asking) as response:
            assert response.status == (204 if answer else 405)


@pytest.mark.parametrize(
    "origins", ["example.org", "https://a.org/path", "https://a.org,b", "https://*.a.org"]
)
def test_an_invalid_origin_is_rejected(origins: str) -> None:
    with pytest.raises(ValueError, match="is not an origin"):
        RouterSettings(cors_origins=origins)


async def test_tls_on_both_ports(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, key = write_certificate(authority, tmp_path, "127.0.0.1", "localhost")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    files = {"tls_certificate_file": certificate, "tls_key_file": key}
    async with running_cluster(HELLO, (Role.AGGREGATED,), **files) as cluster:
        addresses = cluster.service.addresses
        url = f"https://{addresses.http}/v1/completions"
        async with cluster.session.post(url, json={"prompt": "x"}, ssl=trusting) as response:
            assert (await response.json())["choices"][0]["text"] == "hello"
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await cluster.session.post(url, json={"prompt": "x"})
        with pytest.raises(aiohttp.ClientError):
            await cluster.session.post(cluster.url("/v1/completions"), json={"prompt": "x"})
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        async with grpc.aio.secure_channel(addresses.grpc, credentials) as channel:
            answer = await cluster.inference(channel).GenerateOnce(pb.GenerateRequest(text="x"))
        assert answer.choices[0].text == "hello"
        async with cluster.channel() as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.inference(channel).GenerateOnce(pb.GenerateRequest(text="x"))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_bad_files_stop_the_start(tmp_path: Path) -> None:
    for name in ("api_keys_file", "tls_key_file"):
        files: dict[str, Any] = {name: tmp_path / "none"}
        if name == "tls_key_file":
            files["tls_certificate_file"] = tmp_path / "none"
        with pytest.raises(SettingError, match="cannot be read"):
            RouterService(RouterSettings(secret=SECRET, **files))
    assert RouterSettings(api_keys=KEY).masked()["api_keys"] == "***"
    assert KEY not in repr(RouterSettings(api_keys=KEY))
