"""Errors over gRPC carry google.rpc's details, and HTTP errors a Retry-After header."""

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status

from contract.errors import KvbatonError, WorkerLostError
from contract.identity import Role
from protos import inference_pb2 as pb
from protos.worker_pb2 import Credit
from router.grpc.servicer import REQUEST_ID_KEY
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.text.tiny_model import END

DONE = Script(tokens=[END])


async def details(cluster: Cluster, request: pb.GenerateRequest, **options: Any) -> dict[type, Any]:
    """Return the details of the error that a request ends with, by their type."""
    async with cluster.channel() as channel:
        call = cluster.inference(channel).GenerateOnce(request, **options)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        initial = dict(await call.initial_metadata())
    trailing: dict[str, Any] = dict(caught.value.trailing_metadata())
    status = Status.FromString(trailing["grpc-status-details-bin"])
    assert (status.code, status.message) == (caught.value.code().value[0], caught.value.details())
    found: dict[type, Any] = {}
    for kind in (ErrorInfo, BadRequest, RetryInfo, RequestInfo):
        for detail in status.details:
            if detail.Is(kind.DESCRIPTOR):
                found[kind] = kind()
                detail.Unpack(found[kind])
    assert found[ErrorInfo].domain == "kvbaton"
    if RequestInfo in found:
        assert found[RequestInfo].request_id == initial[REQUEST_ID_KEY]
    return found


async def test_a_field_at_fault_is_named() -> None:
    async with running_cluster(DONE, (Role.AGGREGATED,)) as cluster:
        sampling = pb.SamplingParams(temperature=3)
        found = await details(cluster, pb.GenerateRequest(text="x", sampling=sampling))
        (violation,) = found[BadRequest].field_violations
        assert violation.field == "temperature"
        assert "temperature is 3.0" in violation.description
        assert found[ErrorInfo].reason == "INVALID_REQUEST"
        assert found.keys() == {ErrorInfo, BadRequest, RequestInfo}
        found = await details(cluster, pb.GenerateRequest(text="x", model="other"))
        assert (found[ErrorInfo].reason, found[ErrorInfo].metadata["code"]) == (
            "NOT_FOUND",
            "model_not_found",
        )


async def test_a_refused_key_has_details_too() -> None:
    async with running_cluster(DONE, (), api_keys="k") as cluster:
        found = await details(cluster, pb.GenerateRequest(text="x"))
        assert found[ErrorInfo].reason == "UNAUTHENTICATED"
        assert found[ErrorInfo].metadata["code"] == "invalid_api_key"


async def test_unavailable_has_a_time_to_retry() -> None:
    async with running_cluster(DONE, ()) as cluster:
        found = await details(cluster, pb.GenerateRequest(text="x"))
        assert found[RetryInfo].retry_delay.seconds == 1
        async with cluster.session.post(cluster.url("/v1/completions"), json={"prompt": "x"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")


async def test_overload_has_a_time_to_retry() -> None:
    script = Script(tokens=[END], stall_at=0)
    async with running_cluster(script, (Role.AGGREGATED,), max_queue=1) as cluster:
        worker = cluster.workers["both-0"]
        first = asyncio.create_task(cluster.post("/v1/completions", {"prompt": "x"}))
        await worker.received.wait_for(lambda each: len(each.decodes) == 1)
        worker.stream.grant(Credit(max_requests=1, max_tokens=100))
        await cluster.until(lambda state: state["workers"][0]["max_requests"] == 1)
        second = asyncio.create_task(cluster.post("/v1/completions", {"prompt": "x"}))
        await cluster.until(lambda state: state["num_in_line"] == 1)
        found = await details(cluster, pb.GenerateRequest(text="x"))
        assert (found[ErrorInfo].reason, found[RetryInfo].retry_delay.seconds) == ("OVERLOADED", 1)
        second.cancel()
        first.cancel()


@pytest.mark.parametrize(("error", "seconds"), [(WorkerLostError("gone"), "1"), (KvbatonError("bug"), None)])
async def test_a_lost_worker_has_a_time_to_retry(error: KvbatonError, seconds: str | None) -> None:
    script = Script(tokens=[END], fail_at=0, error=error)
    async with (
        running_cluster(script, (Role.AGGREGATED,), max_replays=0) as cluster,
        cluster.session.post(cluster.url("/v1/completions"), json={"prompt": "x"}) as response,
    ):
        assert response.status == (503 if seconds else 500)
        assert response.headers.get("Retry-After") == seconds


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce", "Tokenize"])
async def test_invalid_bytes_are_the_clients_mistake(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running_cluster(DONE, (Role.AGGREGATED,)) as cluster, cluster.channel() as channel:
        path = f"/kvbaton.v1.Inference/{method}"
        untyped: Any = channel
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if method == "Generate":
                await untyped.unary_stream(path)(b"\xff\xff").read()
            else:
                await untyped.unary_unary(path)(b"\xff\xff")
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "cannot be decoded" in (caught.value.details() or "")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
