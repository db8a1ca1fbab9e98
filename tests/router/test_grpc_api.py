"""kvbaton.v1.Inference over a real channel: the same answers as HTTP."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from contract.identity import Role
from protos import inference_pb2 as pb
from protos import worker_pb2
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.text.tiny_model import END, word_id

HELLO = Script(tokens=[word_id("hello"), word_id(" world"), END])


async def generate(
    cluster: Cluster, request: pb.GenerateRequest, **options: Any
) -> list[pb.GenerateResponse]:
    async with cluster.channel() as channel:
        return [message async for message in cluster.inference(channel).Generate(request, **options)]


async def test_text_in_tokens_text_usage_and_timings_out() -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        messages = await generate(cluster, pb.GenerateRequest(text="hello", request_id="mine", model="tiny"))
    assert {message.request_id for message in messages} == {"mine"}
    choices = [message.choices[0] for message in messages]
    assert [list(choice.token_ids) for choice in choices] == [[token] for token in HELLO.tokens]
    assert "".join(choice.text for choice in choices) == "hello world"
    assert [choice.finish_reason for choice in choices] == [0, 0, pb.FINISH_REASON_STOP]
    assert [message.HasField("usage") for message in messages] == [False, False, True]
    usage, timings = messages[-1].usage, messages[-1].timings
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (1, 3, 0)
    parts = (timings.queue, timings.prefill, timings.transfer, timings.first_decode_step, timings.decode)
    assert sum(parts) == timings.end_to_end > 0


async def test_one_name_twice_at_once_is_two_requests() -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        request = pb.GenerateRequest(text="hello", request_id="same")
        first, second = await asyncio.gather(generate(cluster, request), generate(cluster, request))
        assert len(first) == len(second) == 3
        ids = {decode.task.request_id for decode in cluster.workers["both-0"].received.decodes}
        assert len(ids) == 2


async def test_unset_fields_take_the_same_defaults_as_http() -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        await generate(cluster, pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6])))
        await cluster.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 126})
        by_grpc, by_http = [decode.task for decode in cluster.workers["both-0"].received.decodes]
    for task in (by_grpc, by_http):
        task.ClearField("request_id")
        task.ClearField("deadline_seconds")
        task.sampling.ClearField("seed")
    assert by_grpc == by_http


async def test_every_field_reaches_the_worker() -> None:
    """0.7 arrives as 0.7, not as its nearest 32-bit float: HTTP and gRPC sample the same tokens."""
    sampling = pb.SamplingParams(
        temperature=0.7,
        top_k=4,
        top_p=0.9,
        seed=-3,
        max_tokens=7,
        min_tokens=1,
        stop=["rl"],
        stop_token_ids=[250],
        ignore_eos=True,
        logprobs=1,
        min_p=0.05,
        presence_penalty=0.3,
        frequency_penalty=-0.6,
        repetition_penalty=1.1,
        logit_bias={9: 0.1, 5: -100},
        allowed_token_ids=[5, 6],
    )
    script = Script(tokens=HELLO.tokens, logprobs={word_id("hello"): -0.5})
    async with running_cluster(script, (Role.AGGREGATED,)) as cluster:
        request = pb.GenerateRequest(text="hello", sampling=sampling, priority=-1, cache_salt="s")
        messages = await generate(cluster, request)
        task = cluster.workers["both-0"].received.decodes[0].task
    assert task.sampling == worker_pb2.EngineSampling(
        temperature=0.7,
        top_k=4,
        top_p=0.9,
        seed=-3,
        max_tokens=7,
        min_tokens=1,
        stop_token_ids=[250],
        ignore_eos=True,
        logprobs=1,
        min_p=0.05,
        presence_penalty=0.3,
        frequency_penalty=-0.6,
        repetition_penalty=1.1,
        biased_token_ids=[5, 9],
        biases=[-100.0, 0.1],
        allowed_token_ids=[5, 6],
    )
    assert (task.priority, task.cache_salt) == (-1, "s")
    logprob = messages[0].choices[0].logprobs[0]
    assert (logprob.token_id, logprob.logprob, logprob.rank) == (word_id("hello"), -0.5, 1)
    assert [(top.token_id, top.rank) for top in logprob.top] == [(word_id("hello"), 1)]
    last = messages[-1].choices[0]
    assert (last.stop_reason, last.finish_reason) == ("rl", pb.FINISH_REASON_STOP)
    assert "".join(message.choices[0].text for message in messages) == "hello wo"


async def test_http_sends_the_same_task_by_the_same_names() -> None:
    fields: dict[str, Any] = {
        "min_p": 0.05,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.6,
        "repetition_penalty": 1.1,
    }
    sampling = pb.SamplingParams(
        seed=1, max_tokens=3, logit_bias={9: 0.1, 5: -100}, allowed_token_ids=[5], **fields
    )
    body = {
        **fields,
        "seed": 1,
        "max_tokens": 3,
        "logit_bias": {"9": 0.1, "5": -100},
        "allowed_token_ids": [5],
    }
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        await generate(cluster, pb.GenerateRequest(text="hello", sampling=sampling))
        await cluster.post("/v1/completions", {"prompt": "hello", **body})
        by_grpc, by_http = [decode.task.sampling for decode in cluster.workers["both-0"].received.decodes]
    assert by_grpc == by_http


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "neither text nor token_ids"),
        (pb.GenerateRequest(text=""), grpc.StatusCode.INVALID_ARGUMENT, "prompt is empty"),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 128)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "maximum context length is 128",
        ),
        (
            pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=3)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature is 3.0",
        ),
        (
            pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=0)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "max_tokens is 0",
        ),
        (
            pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop=[""])),
            grpc.StatusCode.INVALID_ARGUMENT,
            "empty string",
        ),
        (pb.GenerateRequest(text="x", model="other"), grpc.StatusCode.NOT_FOUND, "`other`"),
    ],
)
async def test_bad_input_has_its_code(
    request_: pb.GenerateRequest, code: grpc.StatusCode, words: str
) -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(cluster, request_)
        assert caught.value.code() == code
        assert words in (caught.value.details() or "")
        assert cluster.workers["both-0"].received.decodes == []


async def test_no_worker_is_unavailable() -> None:
    async with running_cluster(HELLO, ()) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(cluster, pb.GenerateRequest(text="x"))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_client_that_cancels_cancels_on_both_workers() -> None:
    async with (
        running_cluster(Script(tokens=HELLO.tokens, stall_at=1)) as cluster,
        cluster.channel() as channel,
    ):
        call = cluster.inference(channel).Generate(pb.GenerateRequest(text="x"))
        await call.read()
        call.cancel()
        async with asyncio.timeout(20):
            for worker in cluster.workers.values():
                await worker.received.wait_for(lambda each: len(each.cancels) == 1)


async def test_a_clients_deadline_is_the_requests() -> None:
    async with running_cluster(Script(tokens=HELLO.tokens, stall_at=1)) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(cluster, pb.GenerateRequest(text="x"), timeout=1.0)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(20):
            for worker in cluster.workers.values():
                await worker.received.wait_for(lambda each: len(each.cancels) == 1)
        assert cluster.workers["prefill-0"].received.prefills[0].task.deadline_seconds < 2.0


async def test_health_follows_the_workers() -> None:
    async with running_cluster(HELLO, ()) as cluster, cluster.channel() as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="kvbaton.v1.Inference"))
        seen = health_pb2.HealthCheckResponse
        async with asyncio.timeout(20):
            assert (await watch.read()).status in (seen.NOT_SERVING, seen.SERVICE_UNKNOWN)
            worker = await cluster.add(Role.AGGREGATED)
            while (await watch.read()).status != seen.SERVING:
                pass
            await worker.die()
            assert (await watch.read()).status == seen.NOT_SERVING


async def test_reflection_lists_the_service() -> None:
    async with running_cluster(HELLO, ()) as cluster:
        address = cluster.service.addresses.grpc

        def look() -> tuple[set[str], str]:
            with grpc.insecure_channel(address) as channel:
                found = ProtoReflectionDescriptorDatabase(channel)
                service = DescriptorPool(found).FindServiceByName("kvbaton.v1.Inference")
                return set(found.get_services()), service.methods[0].name

        services, method = await asyncio.to_thread(look)
    assert {"kvbaton.v1.Inference", "grpc.health.v1.Health"} <= services
    assert method == "Generate"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": ["rl"]}, "hello wo"),
        ({"stop": ["rl"], "include_stop_str_in_output": True}, "hello worl"),
        ({}, "hello world"),
        ({"skip_special_tokens": True}, "hello world"),
        ({"skip_special_tokens": False}, "hello world<|end|>"),
    ],
)
async def test_what_ended_the_answer_is_in_its_text_where_asked_for(
    fields: dict[str, Any], text: str
) -> None:
    request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(**fields))
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        messages = await generate(cluster, request)
    assert "".join(message.choices[0].text for message in messages) == text
