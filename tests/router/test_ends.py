"""However a request ends, it ends once, clearly, and nothing is left on a worker."""

import asyncio
import json
import socket
from typing import Any

import grpc
import pytest

from contract.errors import InternalError, OverloadedError, TransferError
from contract.identity import Role
from protos import inference_pb2 as pb
from protos import worker_pb2
from tests.fakes.router.script import Script
from tests.fakes.router.worker import ScriptedWorker
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.text.tiny_model import END, byte_ids

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
TOKENS = [*byte_ids(b"abcdef"), END]
FORMS = [PAIR, (Role.AGGREGATED,)]


async def nothing_is_left(cluster: Cluster) -> None:
    """Wait until the router holds no request and no credit."""
    state = await cluster.debug_state()
    assert set(state["requests"].values()) == {0}
    assert all(worker["num_legs"] == 0 and worker["num_leg_tokens"] == 0 for worker in state["workers"])


async def cancelled_on(*workers: ScriptedWorker) -> None:
    async with asyncio.timeout(20):
        for worker in workers:
            await worker.received.wait_for(lambda each: len(each.cancels) == 1)


@pytest.mark.parametrize("roles", FORMS)
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stall_at", [0, 1])
async def test_a_client_that_goes_away_cancels_a_whole_answer(
    path: str, stall_at: int, roles: tuple[Role, ...]
) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}

    def script(task: worker_pb2.Task) -> Script:
        return Script(tokens=TOKENS, stall_at=max(stall_at, task.first_index))

    async with running_cluster(script, roles) as cluster:
        asking = asyncio.create_task(cluster.post(path, body))
        last = [*cluster.workers.values()][-1]
        await last.received.wait_for(lambda worker: len(worker.decodes) == 1)
        asking.cancel()
        await cancelled_on(*cluster.workers.values())
        ids = {worker.received.cancels[0].request_id for worker in cluster.workers.values()}
        assert ids == {last.received.decodes[0].task.request_id}
        await nothing_is_left(cluster)
        metrics = await cluster.metrics()
        assert metrics['kvbaton_request_errors_total{kind="cancelled"}'] == 1


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_client_that_goes_away_cancels_a_stream_before_the_second_token(path: str) -> None:
    """The prefill worker may still hold its lease, so both receive the cancel."""
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with running_cluster(Script(tokens=TOKENS, stall_at=1)) as cluster:
        response = await cluster.session.post(cluster.url(path), json=body)
        assert (await response.content.readline()).startswith(b"data: ")
        response.close()
        await cancelled_on(*cluster.workers.values())
        await nothing_is_left(cluster)


async def test_a_client_that_goes_away_later_cancels_the_decode_worker_only() -> None:
    """The second token shows that the KV was verified and the lease released."""
    body = {"prompt": "x", "stream": True}
    async with running_cluster(Script(tokens=TOKENS, stall_at=3)) as cluster:
        response = await cluster.session.post(cluster.url(TEXT), json=body)
        while b'c","logprobs"' not in await response.content.readline():
            pass
        response.close()
        await cancelled_on(cluster.workers["decode-0"])
        await nothing_is_left(cluster)
        assert cluster.workers["prefill-0"].received.cancels == []


async def ask(cluster: Cluster, stream: bool) -> tuple[int, list[dict[str, Any]]]:
    """Ask for one completion; return its status, and the events of a stream (without [DONE]) or the one object."""
    body = {"prompt": "x", "stream": stream}
    async with asyncio.timeout(20), cluster.session.post(cluster.url(TEXT), json=body) as response:
        text = await response.text()
        assert "[DONE]" not in text
        if response.content_type == "application/json":
            return response.status, [json.loads(text)]
        return response.status, [json.loads(event[len("data: ") :]) for event in text.split("\n\n") if event]


@pytest.mark.parametrize("roles", FORMS)
@pytest.mark.parametrize("die_at", [0, 1, 4])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_workers_death_is_one_clear_error(
    die_at: int, stream: bool, roles: tuple[Role, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the workers, the client's error does not."""
    async with running_cluster(Script(tokens=TOKENS, die_at=die_at), roles, max_replays=0) as cluster:
        dead = "prefill-0" if die_at == 0 and Role.PREFILL in roles else [*cluster.workers][-1]
        status, events = await ask(cluster, stream)
        error = events[-1]["error"]
        assert (error["type"], error["code"]) == ("server_error", "worker_lost")
        assert "a worker" in error["message"] and dead not in error["message"]
        assert any(f"fails on {', '.join(cluster.workers)}" in line for line in caplog.messages)
        assert sum("error" in event for event in events) == 1
        assert status == (200 if len(events) > 1 else 503)
        await nothing_is_left(cluster)
        state = await cluster.debug_state()
        assert dead not in {worker["worker_id"] for worker in state["workers"]}


async def test_the_other_leg_of_a_dead_worker_is_cancelled() -> None:
    async with running_cluster(Script(tokens=TOKENS, die_at=0, stall_at=1), max_replays=0) as cluster:
        status, _ = await cluster.post(TEXT, {"prompt": "x"})
        assert status == 503
        await cancelled_on(cluster.workers["decode-0"])


@pytest.mark.parametrize(
    ("fail_at", "stall_at", "who", "other_is_cancelled"),
    [(0, 1, "prefill-0", True), (1, None, "decode-0", True), (3, None, "decode-0", False)],
)
async def test_a_workers_own_error_reaches_the_client(
    fail_at: int, stall_at: int | None, who: str, other_is_cancelled: bool
) -> None:
    error = TransferError("the digest differs")
    async with running_cluster(
        Script(tokens=TOKENS, fail_at=fail_at, stall_at=stall_at, error=error), max_replays=0
    ) as cluster:
        status, answer = await cluster.post(TEXT, {"prompt": "x"})
        assert status == 500
        assert answer["error"]["message"] == "the digest differs"
        assert answer["error"]["code"] == "transfer_failed"
        other = next(worker for name, worker in cluster.workers.items() if name != who)
        if other_is_cancelled:
            await cancelled_on(other)
        await nothing_is_left(cluster)
        await cluster.service.stop()
        assert cluster.workers[who].received.cancels == []
        assert len(other.received.cancels) == other_is_cancelled


@pytest.mark.parametrize(
    ("refusal", "status"), [(OverloadedError("no room"), 429), (InternalError("a bug"), 500)]
)
async def test_a_refused_leg_ends_the_request_and_the_other_leg(refusal: Any, status: int) -> None:
    def script(task: worker_pb2.Task) -> Script:
        return Script(tokens=TOKENS, refuse=refusal) if task.first_index else Script(tokens=TOKENS)

    async with running_cluster(script, max_replays=0) as cluster:
        # The decode worker refuses; the prefill worker has accepted.
        got, answer = await cluster.post(TEXT, {"prompt": "x"})
        assert got == status
        assert refusal.message in answer["error"]["message"]
        await cancelled_on(cluster.workers["prefill-0"])
        await cluster.service.stop()
        assert cluster.workers["decode-0"].received.cancels == []


async def test_a_gap_in_a_workers_stream_is_the_workers_loss() -> None:
    script = Script(tokens=TOKENS, gap_at=2)
    async with running_cluster(script, max_replays=0, request_timeout_seconds=4) as cluster:
        status, answer = await cluster.post(TEXT, {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "worker_lost")
        # of a later token than 3 if the prefill worker's one comes late: until then the gap may not matter
        assert "after token 1" in answer["error"]["message"]
        await cancelled_on(cluster.workers["decode-0"])


async def test_the_deadline_ends_a_request_that_waits() -> None:
    script = Script(tokens=TOKENS, stall_at=1)
    async with running_cluster(script, request_timeout_seconds=1.0) as cluster:
        status, answer = await cluster.post(TEXT, {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (504, "deadline")
        assert "with 1 tokens delivered" in answer["error"]["message"]
        await cancelled_on(*cluster.workers.values())


async def test_the_deadline_ends_a_request_whose_body_never_comes() -> None:
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    async with running_cluster(Script(tokens=TOKENS), request_timeout_seconds=0.3) as cluster:
        reader, writer = await asyncio.open_connection(*cluster.service.addresses.http.split(":"))
        writer.write(head % TEXT.encode())
        async with asyncio.timeout(20):
            assert (await reader.readline()).startswith(b"HTTP/1.1 504 ")
        writer.close()
        await writer.wait_closed()
        await nothing_is_left(cluster)


async def test_entries_of_other_attempts_unknown_requests_and_repeats_are_dropped() -> None:
    async with running_cluster(Script(tokens=TOKENS, stall_at=2)) as cluster:
        decode = cluster.workers["decode-0"]
        asking = asyncio.create_task(cluster.post(TEXT, {"prompt": "x", "return_token_ids": True}))
        await decode.received.wait_for(lambda worker: len(worker.decodes) == 1)
        name = decode.received.decodes[0].task.request_id
        wrong: dict[str, Any] = {"token_ids": byte_ids(b"zzz"), "first_index": 2}
        decode.stream.send(
            worker_pb2.TokenEntry(request_id=name, attempt=7, **wrong),
            worker_pb2.TokenEntry(request_id="nobody", **wrong),
            worker_pb2.TokenEntry(request_id=name, first_index=1, token_ids=byte_ids(b"b")),
            worker_pb2.TokenEntry(request_id=name, first_index=1, token_ids=byte_ids(b"bc")),
            worker_pb2.TokenEntry(
                request_id=name, first_index=2, token_ids=[*byte_ids(b"cd"), END], finish_reason="stop"
            ),
        )
        _, answer = await asking
    assert answer["choices"][0]["text"] == "abcd"
    assert answer["choices"][0]["token_ids"] == [*byte_ids(b"abcd"), END]


@pytest.mark.parametrize("bound", [{"client_stall_seconds": 0.3}, {"client_buffer_bytes": 65536}])
async def test_a_client_that_reads_nothing_is_cancelled(bound: dict[str, Any]) -> None:
    """It is bounded in seconds and in bytes."""
    best = {token: -0.1 * token for token in range(5, 25)}
    script = Script(tokens=byte_ids(b"x" * 20_000), tokens_per_step=50, logprobs=best)
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "x"}],
            "stream": True,
            "logprobs": True,
            "top_logprobs": 20,
        }
    ).encode()
    head = (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    async with running_cluster(script, (), **bound) as cluster:
        both = await cluster.add(Role.AGGREGATED, max_model_len=30_000)
        await cluster.service.wait_ready()
        host, port = cluster.service.addresses.http.split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(head % (CHAT.encode(), len(body)) + body)
            await cancelled_on(both)
        await cluster.until(lambda state: not any(state["requests"].values()))
        await nothing_is_left(cluster)


async def test_grpc_errors_have_their_codes() -> None:
    async with (
        running_cluster(
            Script(tokens=TOKENS, fail_at=1, error=TransferError("torn")), max_replays=0
        ) as cluster,
        cluster.channel() as channel,
    ):
        stub = cluster.inference(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(pb.GenerateRequest(text="x")):
                pass
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        assert caught.value.details() == "torn"
        trailing = dict(caught.value.trailing_metadata() or ())
        assert trailing["kvbaton-error-kind"] == "transfer_failed"


async def test_one_request_that_ends_badly_leaves_the_others_alone() -> None:
    def script(task: worker_pb2.Task) -> Script:
        return Script(tokens=TOKENS, fail_at=2 if task.sampling.seed == 1 else None)

    async with running_cluster(script) as cluster:
        answers = await asyncio.gather(
            *(cluster.post(TEXT, {"prompt": "x", "seed": seed}) for seed in (0, 1, 2, 1, 3))
        )
    assert [status for status, _ in answers] == [200, 500, 200, 500, 200]
