"""Embeddings over HTTP and gRPC with scripted workers: input, placement, replay, cancellation, errors."""

import asyncio
import base64
import struct
from typing import Any

import grpc
import grpc.aio
import pytest

from contract.errors import InternalError, InvalidRequestError, KvbatonError, OverloadedError
from contract.identity import Role
from protos import inference_pb2 as inference
from protos import worker_pb2 as pb
from tests.fakes.router.script import Script
from tests.router.cluster import MODEL, PAIR, Cluster, running_cluster
from tests.router.test_ends import nothing_is_left
from tests.text.tiny_model import byte_ids

URL = "/v1/embeddings"
TABLE = [0.5, -0.25, 0.75]


def by_length(task: pb.Task) -> Script:
    """Return a script whose embedding depends on the prompt."""
    return Script(embedding=(*TABLE, len(task.prompt_token_ids)), num_cached_tokens=1)


async def embeddings(cluster: Cluster, given: Any, **fields: Any) -> list[Any]:
    async with asyncio.timeout(30):
        status, body = await cluster.post(URL, {"input": given, **fields})
    assert status == 200, body
    assert [entry["index"] for entry in body["data"]] == list(range(len(body["data"])))
    assert {entry["object"] for entry in body["data"]} == {"embedding"}
    return [entry["embedding"] for entry in body["data"]]


async def attach_first(cluster: Cluster, role: Role) -> None:
    """Attach the first worker, and wait until the router has loaded its model."""
    await cluster.add(role)
    async with asyncio.timeout(20):
        while not (await cluster.get("/v1/models"))[1]["data"]:
            await asyncio.sleep(0.01)


async def test_every_shape_of_input() -> None:
    """A4."""
    async with running_cluster(by_length) as cluster:
        assert await embeddings(cluster, "ab") == [[*TABLE, 2.0]]
        assert await embeddings(cluster, ["abc", "a", "ab"]) == [[*TABLE, n] for n in (3.0, 1.0, 2.0)]
        assert await embeddings(cluster, [5, 6, 7, 8]) == [[*TABLE, 4.0]]
        assert await embeddings(cluster, [[5, 6], [7]], model=MODEL, user="me") == [
            [*TABLE, 2.0],
            [*TABLE, 1.0],
        ]
        worker = cluster.workers["prefill-0"]
        assert list(worker.received.embeds[0].task.prompt_token_ids) == byte_ids(b"ab")
        assert not cluster.workers["decode-0"].received.embeds and not worker.received.prefills
        assert (await cluster.metrics())['kvbaton_request_success_total{finished_reason="stop"}'] == 7
        await nothing_is_left(cluster)


async def test_the_response_is_openais() -> None:
    async with running_cluster(by_length) as cluster:
        status, body = await cluster.post(
            URL, {"input": ["ab", "c"], "encoding_format": "base64", "priority": 3, "cache_salt": "s"}
        )
        assert status == 200
        assert {name: body[name] for name in ("object", "model", "usage")} == {
            "object": "list",
            "model": MODEL,
            "usage": {"prompt_tokens": 3, "total_tokens": 3},
        }
        first, second = (base64.b64decode(entry["embedding"]) for entry in body["data"])
        assert struct.unpack("<4f", first) == (*TABLE, 2.0)
        assert struct.unpack("<4f", second) == (*TABLE, 1.0)
        task = cluster.workers["prefill-0"].received.embeds[0].task
        assert (task.priority, task.cache_salt) == (3, "s")


async def test_the_pooling_of_a_request_goes_to_its_worker() -> None:
    """A41: over HTTP and gRPC; without one the worker reads the model's folder."""
    async with running_cluster(by_length) as cluster, cluster.channel() as channel:
        stub = cluster.inference(channel)
        await embeddings(cluster, "a")
        await embeddings(cluster, "a", pooling_type="max", normalize=False)
        await embeddings(cluster, ["a", "b"], pooling_type="mean")
        prompt = inference.EmbedInput(text="a")
        await stub.Embed(
            inference.EmbedRequest(inputs=[prompt], pooling_type="max", normalize=False), timeout=20
        )
        await stub.Embed(inference.EmbedRequest(inputs=[prompt]), timeout=20)
        with pytest.raises(grpc.aio.AioRpcError, match="pooling_type is 'cls'"):
            await stub.Embed(inference.EmbedRequest(inputs=[prompt], pooling_type="cls"), timeout=20)
        orders = cluster.workers["prefill-0"].received.embeds
        assert [(order.pooling_type, order.normalize) for order in orders] == [
            ("", True),
            ("max", False),
            ("mean", True),
            ("mean", True),
            ("max", False),
            ("", True),
        ]


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["a", 5]}, "input"),
    ({"input": ["a", ""]}, "input"),
    ({"input": [[1], "a", {}]}, "input"),
    ({"input": [1, 300]}, "input"),
    ({"input": [-1]}, "input"),
    ({"input": [True]}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": "a" * 129}, "input"),
    ({"input": "a", "dimensions": 3}, "dimensions"),
    ({"input": "a", "dimensions": "four"}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "pooling_type": "cls"}, "pooling_type"),
    ({"input": "a", "pooling_type": 3}, "pooling_type"),
    ({"input": "a", "normalize": "yes"}, "normalize"),
    ({"input": "a", "encoding_format": 8}, "encoding_format"),
    ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"input": "a", "user": 7}, "user"),
    ({"input": "a", "priority": 2**31}, "priority"),
    ({"input": "a", "cache_salt": 1}, "cache_salt"),
    ({"input": "a", "cache_salt": "s" * 1025}, "cache_salt"),
]


async def test_bad_input_names_the_field() -> None:
    async with running_cluster(by_length) as cluster:
        for body, param in BAD:
            status, answer = await cluster.post(URL, body)
            assert (status, answer["error"]["param"]) == (400, param), (body, answer)
            assert answer["error"]["type"] == "invalid_request_error"
        status, answer = await cluster.post(URL, {"input": "a", "model": "other"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert not cluster.workers["prefill-0"].received.embeds
        assert await embeddings(cluster, "a" * 128) == [[*TABLE, 128.0]]
        await nothing_is_left(cluster)


async def test_unknown_fields_under_strict_api() -> None:
    async with running_cluster(by_length, strict_api=True) as cluster:
        status, answer = await cluster.post(URL, {"input": "a", "temperature": 1})
        assert (status, answer["error"]["param"]) == (400, "temperature")


async def test_only_decode_workers_is_a_clear_503() -> None:
    async with running_cluster(by_length, ()) as cluster:
        await attach_first(cluster, Role.DECODE)
        status, answer = await cluster.post(URL, {"input": "a"})
        assert status == 503
        assert "no prefill worker is attached" in answer["error"]["message"]
        await cluster.add(Role.AGGREGATED)
        assert await embeddings(cluster, "a") == [[*TABLE, 1.0]]
        assert len(cluster.workers["both-0"].received.embeds) == 1
        await cluster.add(Role.PREFILL)
        await embeddings(cluster, "a")
        assert len(cluster.workers["prefill-0"].received.embeds) == 1


async def test_a_prefill_worker_alone_is_enough() -> None:
    async with running_cluster(by_length, ()) as cluster:
        await attach_first(cluster, Role.PREFILL)
        assert await embeddings(cluster, "a") == [[*TABLE, 1.0]]


async def test_a_workers_death_is_replayed_elsewhere() -> None:
    def script(task: pb.Task) -> Script:
        return Script(die_at=0) if task.attempt == 0 else by_length(task)

    async with running_cluster(script) as cluster:
        await cluster.add(Role.PREFILL, "prefill-1")
        assert await embeddings(cluster, "abc") == [[*TABLE, 3.0]]
        attempts = [
            call.task.attempt for worker in cluster.workers.values() for call in worker.received.embeds
        ]
        assert sorted(attempts) == [0, 1]
        assert (await cluster.metrics())['kvbaton_request_replays_total{kind="worker_lost"}'] == 1
        await nothing_is_left(cluster)


@pytest.mark.parametrize("trouble", ["refuse", "error"])
@pytest.mark.parametrize(
    ("error", "status"),
    [(OverloadedError("full"), 200), (InvalidRequestError("bad"), 400), (InternalError("broken"), 500)],
)
async def test_trouble_of_a_worker(trouble: str, error: KvbatonError, status: int) -> None:
    """Errors that another worker may not have are retried there; others end the whole request."""

    def script(task: pb.Task) -> Script:
        is_bad = task.attempt == 0 and len(task.prompt_token_ids) == 2
        own: dict[str, Any] = {"refuse": error} if trouble == "refuse" else {"fail_at": 0, "error": error}
        return Script(**own) if is_bad else by_length(task)

    async with running_cluster(script) as cluster:
        await cluster.add(Role.PREFILL, "prefill-1")
        got, body = await cluster.post(URL, {"input": ["a", "ab", "abc"]})
        assert got == status, body
        await nothing_is_left(cluster)


async def test_a_worker_that_ends_without_an_embedding_has_a_bug() -> None:
    async with running_cluster(Script(embedding=())) as cluster:
        status, answer = await cluster.post(URL, {"input": "a"})
        assert status == 500
        assert "without one" in answer["error"]["message"]
        await nothing_is_left(cluster)


async def test_deadline_and_a_client_that_goes_away_cancel_it() -> None:
    async with running_cluster(Script(stall_at=0), request_timeout_seconds=0.5) as cluster:
        status, answer = await cluster.post(URL, {"input": ["a", "b"]})
        assert status == 504, answer
        worker = cluster.workers["prefill-0"]
        await worker.received.wait_for(lambda it: len(it.cancels) == 2)
    async with running_cluster(Script(stall_at=0)) as cluster:
        worker = cluster.workers["prefill-0"]
        task = asyncio.create_task(cluster.post(URL, {"input": "a"}))
        await worker.received.wait_for(lambda it: bool(it.embeds))
        task.cancel()
        await worker.received.wait_for(lambda it: bool(it.cancels))
        await nothing_is_left(cluster)


async def test_beside_generations() -> None:
    def script(task: pb.Task) -> Script:
        return Script(tokens=byte_ids(b"xyz"), embedding=(float(len(task.prompt_token_ids)),))

    async with running_cluster(script) as cluster:
        asked = [embeddings(cluster, "a" * n) for n in range(1, 9)]
        told = [cluster.post("/v1/completions", {"prompt": "x", "max_tokens": 3}) for _ in range(8)]
        assert await asyncio.gather(*asked) == [[[float(n)]] for n in range(1, 9)]
        assert all(status == 200 for status, _ in await asyncio.gather(*told))


ANSWERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": "a", "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
    ("/v1/responses", {"input": "a"}),
]


async def test_a_model_without_a_head_embeds_and_answers_nothing() -> None:
    """Its pool needs no decode worker; requests for answers are rejected before anything is sent."""
    async with running_cluster(by_length, ()) as cluster, cluster.channel() as channel:
        await cluster.add(Role.PREFILL, embeds_only=True)
        async with asyncio.timeout(20):
            await cluster.service.wait_ready()
        (model,) = (await cluster.get("/v1/models"))[1]["data"]
        assert (model["embeds_only"], (await cluster.get(f"/v1/models/{MODEL}"))[1]) == (True, model)
        assert model["architecture"]["output_modalities"] == ["embeddings"]
        for path, body in ANSWERS:
            status, answer = await cluster.post(path, body)
            assert (status, answer["error"]["param"]) == (400, "model"), (path, answer)
            assert answer["error"]["code"] == "unsupported_parameter"
            assert f"the model {MODEL} has no output head: it gives embeddings only" in str(answer)
        stub = cluster.inference(channel)
        asked = inference.GenerateRequest(text="a")
        for call in (stub.GenerateOnce(asked, timeout=20), stub.Generate(asked, timeout=20).read()):
            with pytest.raises(grpc.aio.AioRpcError, match="embeddings only") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        (listed,) = (await stub.ListModels(inference.ListModelsRequest(), timeout=20)).models
        assert listed.embeds_only
        assert await embeddings(cluster, "ab") == [[*TABLE, 2.0]]
        worker = cluster.workers["prefill-0"]
        assert (worker.received.prefills, worker.received.decodes, len(worker.received.embeds)) == ([], [], 1)
        await nothing_is_left(cluster)


async def test_an_embeddings_task_has_nothing_of_sampling() -> None:
    async with running_cluster(by_length) as cluster, cluster.channel() as channel:
        request = inference.EmbedRequest(inputs=[inference.EmbedInput(text=text) for text in ("a", "b")])
        await cluster.inference(channel).Embed(request, timeout=20)
        await embeddings(cluster, ["a", "b"])
        tasks = [leg.task for leg in cluster.workers["prefill-0"].received.embeds]
        assert len(tasks) == 4
        assert not any(task.HasField("sampling") or task.eos_token_ids for task in tasks)
        for pair in (tasks[:2], tasks[2:]):  # of one request, whose inputs may arrive in any order
            first, second = sorted(task.request_id for task in pair)
            assert second == f"{first}-1"


async def test_grpc_is_the_same() -> None:
    async with running_cluster(by_length, PAIR) as cluster, cluster.channel() as channel:
        stub = cluster.inference(channel)
        ids = inference.EmbedInput(token_ids=inference.TokenIds(ids=[5, 6, 7]))
        request = inference.EmbedRequest(inputs=[inference.EmbedInput(text="ab"), ids], request_id="mine")
        answer = await stub.Embed(request, timeout=20)
        assert [list(each.values) for each in answer.embeddings] == [[*TABLE, 2.0], [*TABLE, 3.0]]
        assert (answer.request_id, answer.usage.prompt_tokens, answer.usage.cached_tokens) == ("mine", 5, 2)
        bad = [
            inference.EmbedRequest(),
            inference.EmbedRequest(inputs=[inference.EmbedInput()]),
            inference.EmbedRequest(inputs=[inference.EmbedInput(text="")]),
            inference.EmbedRequest(inputs=[ids], dimensions=3),
            inference.EmbedRequest(inputs=[ids] * 2049),
        ]
        for each in bad:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Embed(each, timeout=20)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(cluster.workers["prefill-0"].received.embeds) == 2


async def test_dimensions_may_name_the_models_own_number() -> None:
    async with running_cluster(by_length) as cluster:
        assert await embeddings(cluster, "a", dimensions=4) == [[*TABLE, 1.0]]
        status, answer = await cluster.post(URL, {"input": "a", "dimensions": 2})
        assert (status, answer["error"]["param"]) == (400, "dimensions")
        assert "4 only" in answer["error"]["message"]
