"""Internal gRPC on real sockets, with an unauthenticated program at either end."""

import asyncio
import datetime
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme

from contract.addresses import split_address
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from serving.cluster_tls import (
    ROUTER_NAME,
    ClusterTls,
    Party,
    authority_pem,
    peer_names,
    router_tls,
    worker_name,
    worker_tls,
)
from serving.grpc_options import Options, internal_server_options

SECRET, OTHER = "the secret of this cluster, 32+ chars", "the secret of another cluster, 32+"
WORKER = worker_name("w", "boot")


class Recorder(worker_pb2_grpc.WorkerServicer):
    """A listener that records its messages and their senders."""

    def __init__(self) -> None:
        self.received: list[tuple[pb.HandOffRequest, list[str], Any]] = []

    async def HandOff(self, request: pb.HandOffRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Record a message."""
        self.received.append((request, list(peer_names(context)), context.invocation_metadata()))
        return pb.Accepted()

    async def _refuse(self, _request: Any, _context: Any) -> Any:
        raise NotImplementedError

    Prepare: Any = _refuse
    ResetPrefixCache: Any = _refuse
    ReloadWeights: Any = _refuse
    GetModelFiles: Any = _refuse


@asynccontextmanager
async def listening(
    credentials: grpc.ServerCredentials | None, options: Options | None = None
) -> AsyncIterator[tuple[str, Recorder]]:
    """Run a server with these credentials; None: without TLS."""
    server, recorder = grpc.aio.server(options=options), Recorder()
    worker_pb2_grpc.add_WorkerServicer_to_server(recorder, server)
    port = (
        server.add_insecure_port("127.0.0.1:0")
        if credentials is None
        else server.add_secure_port("127.0.0.1:0", credentials)
    )
    await server.start()
    try:
        yield f"127.0.0.1:{port}", recorder
    finally:
        await server.stop(None)


async def ask(channel: grpc.aio.Channel) -> None:
    async with channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        await stub.HandOff(pb.HandOffRequest(request_id="a prompt"), timeout=20)


async def test_both_ends_are_proved_and_named() -> None:
    async with listening(worker_tls(SECRET, "w", "boot").server_credentials) as (address, recorder):
        await ask(router_tls(SECRET).channel(address, WORKER, []))
    ((request, names, metadata),) = recorder.received
    assert (request.request_id, names) == ("a prompt", [ROUTER_NAME])
    assert not [key for key, _ in metadata if "proof" in key or "authorization" in key], "no bearer is sent"


def self_signed(name: str) -> grpc.ServerCredentials:
    issued = trustme.CA().issue_cert(name)
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    return grpc.ssl_server_credentials([(issued.private_key_pem.bytes(), chain)])


ROGUES: dict[str, Callable[[], grpc.ServerCredentials | None]] = {
    "without TLS": lambda: None,
    "self-signed": lambda: self_signed(WORKER),
    "of another cluster": lambda: worker_tls(OTHER, "w", "boot").server_credentials,
    "another worker": lambda: worker_tls(SECRET, "other", "boot").server_credentials,
    "an earlier start of the worker": lambda: worker_tls(SECRET, "w", "earlier").server_credentials,
    "a router as a worker": lambda: (
        ClusterTls(SECRET, Party.ROUTERS, Party.WORKERS, WORKER).server_credentials
    ),
}


@pytest.mark.parametrize("rogue", ROGUES)
async def test_a_rogue_listener_gets_nothing(rogue: str) -> None:
    """H4: any listener on the port received the proof, and then prompts."""
    async with listening(ROGUES[rogue]()) as (address, recorder):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(router_tls(SECRET).channel(address, WORKER, []))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert recorder.received == []


def anonymous(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address)


def without_certificate(address: str) -> grpc.aio.Channel:
    """It trusts the right authority but has no certificate, like a replay of metadata."""
    credentials = grpc.ssl_channel_credentials(authority_pem(SECRET, Party.WORKERS))
    options = [("grpc.ssl_target_name_override", WORKER)]
    return grpc.aio.secure_channel(address, credentials, options=options)


def expired(address: str) -> grpc.aio.Channel:
    issued = trustme.CA().issue_cert(
        ROUTER_NAME, not_after=datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
    )
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    credentials = grpc.ssl_channel_credentials(
        authority_pem(SECRET, Party.WORKERS), issued.private_key_pem.bytes(), chain
    )
    options = [("grpc.ssl_target_name_override", WORKER)]
    return grpc.aio.secure_channel(address, credentials, options=options)


STRANGERS: dict[str, Callable[[str], grpc.aio.Channel]] = {
    "without TLS": anonymous,
    "without a certificate": without_certificate,
    "of another cluster": lambda address: router_tls(OTHER).channel(address, WORKER, []),
    "a worker as a router": lambda address: ClusterTls(
        SECRET, Party.WORKERS, Party.WORKERS, ROUTER_NAME
    ).channel(address, WORKER, []),
    "self-signed and expired": expired,
}


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_a_caller_that_proves_nothing_is_refused(stranger: str) -> None:
    """H4: a constant in the metadata was all that a caller needed."""
    async with listening(worker_tls(SECRET, "w", "boot").server_credentials) as (address, recorder):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(STRANGERS[stranger](address))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert recorder.received == []
        await ask(router_tls(SECRET).channel(address, WORKER, []))


def test_names_of_workers_are_host_names_and_differ() -> None:
    names = {worker_name(*ids) for ids in (("a", "b"), ("a\0b", ""), ("ab", ""), ("", "ab"), ("ä *.", "b"))}
    assert len(names) == 5
    assert all(name.isascii() and " " not in name and name.count(".") == 3 for name in names)


async def test_silent_connections_take_no_more_descriptors_than_they_may() -> None:
    """H7: silent connections to an internal port took every descriptor of a process for 10 s, its admin port's too."""
    credentials = worker_tls(SECRET, "w", "boot").server_credentials
    async with (
        listening(credentials, internal_server_options(3.0, 4)) as (address, recorder),
        router_tls(SECRET).channel(address, WORKER, []) as channel,
    ):
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        await stub.HandOff(pb.HandOffRequest(), timeout=20)
        host, port = split_address(address)
        opened = [await asyncio.open_connection(host, port) for _ in range(20)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in opened]
        try:
            while sum(end.done() for end in ends) < 17:
                await asyncio.wait(
                    [end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED
                )
            await stub.HandOff(pb.HandOffRequest(), timeout=20)
            assert sum(end.done() for end in ends) == 17, "the others wait for their handshake's end"
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            for _, writer in opened:
                writer.close()
    assert len(recorder.received) == 2
