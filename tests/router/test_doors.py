"""Access to a router's public ports, and the log of rejected clients."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from contract.identity import Role
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.text.tiny_model import END

HELLO = Script(tokens=[END])
SILENT = 300


async def test_a_page_that_rebinds_its_name_is_refused() -> None:
    """M9: the API without keys, and the admin port, accept only host names of this machine."""
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        admin = f"http://{cluster.service.addresses.admin}/debug/state"
        for url in (cluster.url("/v1/models"), cluster.url("/health"), admin):
            async with cluster.session.get(url, headers={"Host": "evil.example"}) as response:
                assert response.status == 421, url
            async with cluster.session.get(url, headers={"Host": "localhost:1"}) as response:
                assert response.status == 200, url
        async with cluster.session.post(
            cluster.url("/v1/completions"), json={"prompt": "x"}, headers={"Host": "evil.example"}
        ) as response:
            assert response.status == 421
            assert "allowed_hosts" in (await response.json())["error"]["message"]


async def test_a_page_of_another_site_does_not_read_the_admin_port() -> None:
    """M9: the page is rejected under its own origin too."""
    async with running_cluster(HELLO, ()) as cluster:
        admin = f"http://{cluster.service.addresses.admin}/debug/state"
        for origin, status in (("https://evil.example", 403), ("null", 403), ("http://localhost:3000", 200)):
            async with cluster.session.get(admin, headers={"Origin": origin}) as response:
                assert response.status == status, origin


FORM = {"Content-Type": "multipart/form-data; boundary=b"}
UPLOAD = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n'
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
)


async def status_of(cluster: Cluster, path: str, headers: dict[str, str], data: bytes = b"") -> int:
    async with cluster.session.post(cluster.url(path), data=data, headers=headers) as response:
        return response.status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://[evil"}, 403),
        ({"Origin": "https://app.example"}, 200),
    ],
)
async def test_a_page_of_another_site_sends_no_forms(
    headers: dict[str, str], status: int, tmp_path: Path
) -> None:
    """M9: without a key any page could fill the folder of files: browsers send forms without a preflight."""
    async with running_cluster(
        HELLO, (Role.AGGREGATED,), files_dir=tmp_path, cors_origins="https://app.example"
    ) as cluster:
        assert await status_of(cluster, "/v1/files", {**headers, **FORM}, UPLOAD) == status
        cancel = "/v1/batches/batch_1/cancel"
        assert await status_of(cluster, cancel, headers) == (404 if status == 200 else 403)
        asks = {**headers, "Content-Type": "application/json"}
        assert await status_of(cluster, "/v1/completions", asks, b'{"prompt": "x"}') == 200, "a program may"


async def test_a_page_that_the_service_s_own_name_serves_sends_forms(tmp_path: Path) -> None:
    """M9: behind a proxy that serves pages too; and with API keys, which a page of another site cannot send."""
    own = {"Origin": "https://chat.example", "Host": "chat.example"}
    async with running_cluster(HELLO, (), files_dir=tmp_path / "a", allowed_hosts="*") as cluster:
        assert await status_of(cluster, "/v1/files", {**own, **FORM}, UPLOAD) == 200
        assert await status_of(cluster, "/v1/files", {**own, **FORM, "Host": "b.example"}, UPLOAD) == 403
    async with running_cluster(HELLO, (), files_dir=tmp_path / "b", api_keys="k" * 32) as cluster:
        with_key = {"Origin": "https://evil.example", "Authorization": f"Bearer {'k' * 32}", **FORM}
        assert await status_of(cluster, "/v1/files", with_key, UPLOAD) == 200


async def test_configured_names_pass() -> None:
    """M9: behind a proxy the router has other names."""
    async with running_cluster(HELLO, (), allowed_hosts="api.example") as cluster:
        for host, status in (("api.example", 200), ("evil.example", 421)):
            async with cluster.session.get(cluster.url("/version"), headers={"Host": host}) as response:
                assert response.status == status


async def test_wrong_keys_are_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """L5: the log has address and count, a few lines for any number of attempts, and never the key."""
    caplog.set_level(logging.WARNING)
    async with running_cluster(HELLO, (Role.AGGREGATED,), api_keys="sk-right") as cluster:
        headers = {"Authorization": "Bearer sk-wrong-and-secret"}
        for _ in range(60):
            async with cluster.session.get(cluster.url("/v1/models"), headers=headers) as response:
                assert response.status == 401
        async with cluster.channel() as channel:
            for _ in range(60):
                with pytest.raises(grpc.aio.AioRpcError, match="not valid"):
                    await cluster.inference(channel).ListModels(
                        pb.ListModelsRequest(), metadata=(("authorization", "Bearer sk-wrong-and-secret"),)
                    )
    lines = [r.getMessage() for r in caplog.records if "wrong or missing key" in r.getMessage()]
    assert [line.partition("(")[2] for line in lines] == [f"{n} times so far)" for n in (1, 10, 100)]
    assert all("127.0.0.1" in line for line in lines)
    assert "sk-wrong" not in caplog.text


async def test_a_worker_is_connected_to_when_it_attaches() -> None:
    """P2: the router connects before the first request; a worker that cannot be reached is rejected by name."""
    async with running_cluster(HELLO, (Role.AGGREGATED,), accept_timeout_seconds=0.3) as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match="cannot connect to worker new"):
            await cluster.add(Role.AGGREGATED, "new", address="127.0.0.1:1")
        workers = (await cluster.debug_state())["workers"]
        assert [worker["worker_id"] for worker in workers] == ["both-0"]


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Run a router process that may open 256 descriptors; yield its addresses and its log."""
    secret, log = tmp_path / "secret", tmp_path / "log"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    read_fd, write_fd = os.pipe()
    ports = [word for name in ("http", "grpc", "internal", "admin") for word in (f"--{name}", "127.0.0.1:0")]
    command = [sys.executable, "-m", "cli.main", "router", "--secret-file", str(secret), *ports]
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *command, "--ready-fd", str(write_fd)],
            stderr=out,
            pass_fds=(write_fd,),
        )
    os.close(write_fd)
    try:
        with os.fdopen(read_fd) as ready:
            yield {**json.loads(ready.readline()), "log": log}
    finally:
        process.terminate()
        process.wait(20)


@contextlib.contextmanager
def silent_clients(address: str) -> Iterator[None]:
    """Open ``number`` connections that send nothing."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(SILENT):
            client = stack.enter_context(socket.socket())
            client.settimeout(20)
            client.connect((host, int(port)))
        yield


@pytest.mark.slow
async def test_silent_connections_take_nothing_from_others(crowded: dict[str, Any]) -> None:
    """H7, P3: with 300 silent connections to each port and 256 descriptors, every port answers, and the log is short."""
    timeout = aiohttp.ClientTimeout(total=20)
    with (
        silent_clients(crowded["http"]),
        silent_clients(crowded["grpc"]),
        silent_clients(crowded["admin"]),
    ):
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for url in (f"http://{crowded['http']}/version", f"http://{crowded['admin']}/metrics"):
                for _ in range(5):
                    async with session.get(url, headers={"Connection": "close"}) as response:
                        assert response.status == 200
        async with grpc.aio.insecure_channel(crowded["grpc"]) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            await stub.ListModels(pb.ListModelsRequest(), timeout=40, wait_for_ready=True)
        await asyncio.wait_for(_opens(crowded["internal"]), 20)
    assert crowded["log"].stat().st_size < 100_000


async def _opens(address: str) -> None:
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()
    await writer.wait_closed()
