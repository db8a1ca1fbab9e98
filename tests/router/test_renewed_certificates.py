"""A certificate that is renewed on disk is used from the next connection on, without a restart, by HTTP and gRPC."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
import trustme

from contract.identity import Role
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.certificates import write_certificate
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.text.tiny_model import END, word_id

HELLO = Script(tokens=[word_id("hello"), END])


class Client:
    """A client of HTTP and gRPC that trusts only one authority, so every new connection needs its certificate."""

    def __init__(self, cluster: Cluster, authority: trustme.CA) -> None:
        addresses = cluster.service.addresses
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        self._url = f"https://{addresses.http}/v1/completions"
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting))
        self._channel = grpc.aio.secure_channel(
            addresses.grpc,
            grpc.ssl_channel_credentials(authority.cert_pem.bytes()),
            options=[("grpc.use_local_subchannel_pool", 1)],
        )

    async def ask(self) -> None:
        """Send a request over both APIs. Raises aiohttp.ClientError, or grpc.aio.AioRpcError if only HTTP is trusted."""
        async with self._session.post(self._url, json={"prompt": "x"}) as response:
            assert (await response.json())["choices"][0]["text"] == "hello"
        stub = inference_pb2_grpc.InferenceStub(self._channel)
        assert (await stub.GenerateOnce(pb.GenerateRequest(text="x"))).choices[0].text == "hello"

    async def is_refused(self) -> None:
        """Check that neither API is trusted."""
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await self._session.post(self._url, json={"prompt": "x"})
        stub = inference_pb2_grpc.InferenceStub(self._channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateOnce(pb.GenerateRequest(text="x"))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE

    async def close(self) -> None:
        """Close its connections."""
        await self._session.close()
        await self._channel.close()


@asynccontextmanager
async def serving(folder: Path, authority: trustme.CA) -> AsyncIterator[Callable[[trustme.CA], Client]]:
    """Run a service with a certificate of this authority in the folder; yield a factory of clients."""
    certificate, key = write_certificate(authority, folder, "127.0.0.1")
    files = {"tls_certificate_file": certificate, "tls_key_file": key}
    clients: list[Client] = []
    async with running_cluster(HELLO, (Role.AGGREGATED,), **files) as cluster:

        def client(trusted: trustme.CA) -> Client:
            clients.append(Client(cluster, trusted))
            return clients[-1]

        try:
            yield client
        finally:
            await asyncio.gather(*(one.close() for one in clients))


async def test_new_connections_see_the_renewed_certificate_and_old_ones_live_on(tmp_path: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    async with serving(tmp_path, old) as client:
        connected = client(old)
        await connected.ask()
        await client(new).is_refused()
        for _ in range(2):
            write_certificate(new, tmp_path, "127.0.0.1")
            await client(new).ask()
            await client(old).is_refused()
            await connected.ask()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("key.pem", None, "tls_key_file {} cannot be read"),
        ("cert.pem", None, "tls_certificate_file {} cannot be read"),
        ("cert.pem", b"-----BEGIN CERTIFICATE-----\nMII", "tls_certificate_file {} and tls_key_file"),
        ("key.pem", trustme.CA().issue_cert("localhost").private_key_pem.bytes(), "{} is not the key of"),
    ],
)
async def test_a_pair_that_cannot_be_used_changes_nothing_until_it_is_whole(
    name: str, content: bytes | None, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = trustme.CA(), trustme.CA()
    async with serving(tmp_path, old) as client:
        file = tmp_path / name
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        await client(old).ask()
        await client(old).ask()
        (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert said.format(file) in error
        assert "the old certificate stays in use" in error
        write_certificate(new, tmp_path, "127.0.0.1")
        await client(new).ask()
        await client(old).is_refused()


async def test_a_link_that_is_turned_to_other_files_is_a_renewal(tmp_path: Path) -> None:
    """Kubernetes mounts secrets as a link to the folder of the current version."""
    old, new = trustme.CA(), trustme.CA()
    (tmp_path / "0").mkdir()
    link = tmp_path / "data"
    link.symlink_to("0")
    async with serving(link, old) as client:
        await client(old).ask()
        (tmp_path / "1").mkdir()
        write_certificate(new, tmp_path / "1", "127.0.0.1")
        (tmp_path / "next").symlink_to("1")
        (tmp_path / "next").replace(link)
        await client(new).ask()
        await client(old).is_refused()
