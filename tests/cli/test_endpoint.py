"""Keys and certificates of the client commands, for a service at --url and for a service that they start."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from aiohttp import web

from cli.ask import ask_grpc, served_model
from cli.endpoint import endpoint_at, local_endpoint
from contract.errors import SettingError, UnavailableError
from contract.identity import Role
from launch.arguments import parse
from launch.client_settings import RunSettings
from protos import inference_pb2 as pb
from serving.http_server import start_http
from serving.tls import read_tls
from tests.certificates import write_certificate
from tests.chaos.settings import process_environment
from tests.fakes.router.script import Script
from tests.private_files import write_private
from tests.router.cluster import running_cluster
from tests.text.tiny_model import END, word_id

KEY = "sk-door"
HELLO = Script(tokens=[word_id("hello"), END])


async def kvbaton(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run a command with "hello" as input; return the exit code, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**process_environment(), **environment},
    )
    output, errors = await process.communicate(b"hello\n")
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


@pytest.mark.parametrize("command", [("run", "hello"), ("chat",)])
async def test_the_key_is_sent_to_a_running_service(command: tuple[str, ...]) -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,), api_keys=KEY) as cluster:
        asked = (*command, "--url", cluster.url(""))
        code, output, errors = await kvbaton(*asked, KVBATON_API_KEY=KEY)
        assert (code, output) == (0, "hello\n"), errors
        code, output, errors = await kvbaton(*asked)
        assert (code, output) == (1, "")
        assert "answered 401: no API key was given" in errors


@pytest.mark.parametrize("command", [("run", "hello"), ("chat",)])
async def test_a_service_with_tls_is_trusted_by_its_authority(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    authority = trustme.CA()
    certificate, key = write_certificate(authority, tmp_path, "127.0.0.1")
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    files = {"tls_certificate_file": certificate, "tls_key_file": key}
    async with running_cluster(HELLO, (Role.AGGREGATED,), **files) as cluster:
        asked = (*command, "--url", cluster.url("").replace("http:", "https:"))
        code, output, errors = await kvbaton(*asked, "--ca-file", str(ca_file))
        assert (code, output) == (0, "hello\n"), errors
        code, output, errors = await kvbaton(*asked)
        assert (code, output) == (1, "")
        assert "CERTIFICATE_VERIFY_FAILED" in errors


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_without_authorities_is_named(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    if content:
        file.write_text(content)
    settings = RunSettings(prompt="hello", url="https://x", ca_file=file)
    with pytest.raises(SettingError, match=r"ca_file .*ca.pem cannot be used") as caught:
        endpoint_at("https://x", settings)
    assert caught.value.param == "ca_file"


def test_a_started_service_is_sent_a_key_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, config = tmp_path / "keys", tmp_path / "kvbaton.toml"
    write_private(keys, "in-file\n")
    config.write_text(f'[router]\napi_keys_file = "{keys}"\n')
    monkeypatch.setenv("KVBATON_API_KEY", "of-another-service")
    facts = {"http": "127.0.0.1:1"}
    plain = parse(RunSettings, "kvbaton run", ["hello"])
    assert local_endpoint(plain, facts).api_key is None
    with_file = parse(RunSettings, "kvbaton run", ["hello", "--config", str(config)])
    assert local_endpoint(with_file, facts).api_key == "in-file"
    monkeypatch.setenv("KVBATON_API_KEYS", "given,other")
    endpoint = local_endpoint(with_file, facts)
    assert (endpoint.api_key, endpoint.url) == ("given", "http://127.0.0.1:1")
    assert "given" not in repr(endpoint)


async def test_a_started_service_is_trusted_by_its_certificate_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "one"}]})

    certificate, key = write_certificate(trustme.CA(), tmp_path, "example.org")
    tls = read_tls(certificate, key)
    assert tls is not None
    app = web.Application()
    app.router.add_get("/v1/models", models)
    server = await start_http(app, "127.0.0.1:0", tls=tls.context)
    monkeypatch.setenv("KVBATON_TLS_CERTIFICATE_FILE", str(certificate))
    settings = parse(RunSettings, "kvbaton run", ["hello"])
    try:
        assert await served_model(local_endpoint(settings, {"http": server.address})) == "one"
        (tmp_path / "other").mkdir()
        other, _ = write_certificate(trustme.CA(), tmp_path / "other", "example.org")
        monkeypatch.setenv("KVBATON_TLS_CERTIFICATE_FILE", str(other))
        with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            await served_model(local_endpoint(settings, {"http": server.address}))
    finally:
        await server.close()


@pytest.mark.parametrize("name", ["example.org", "*.example.org", "127.0.0.1"])
async def test_grpc_to_a_started_service_uses_its_certificate(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = write_certificate(trustme.CA(), tmp_path, name)
    files = {"tls_certificate_file": certificate, "tls_key_file": key}
    request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=4))
    async with running_cluster(HELLO, (Role.AGGREGATED,), api_keys=KEY, **files) as cluster:
        addresses = cluster.service.addresses
        monkeypatch.setenv("KVBATON_TLS_CERTIFICATE_FILE", str(certificate))
        monkeypatch.setenv("KVBATON_API_KEYS", KEY)
        endpoint = local_endpoint(parse(RunSettings, "kvbaton run", ["hello"]), addresses.as_dict())
        assert (await ask_grpc(endpoint, addresses.grpc, request)).text == "hello"
        (tmp_path / "other").mkdir()
        other, _ = write_certificate(trustme.CA(), tmp_path / "other", name)
        with pytest.raises(UnavailableError, match=r"gRPC .* UNAVAILABLE"):
            await ask_grpc(replace(endpoint, certificate=other), addresses.grpc, request)
        with pytest.raises(UnavailableError, match="does not present"):
            await ask_grpc(replace(endpoint, url="https://127.0.0.1:1"), addresses.grpc, request)
