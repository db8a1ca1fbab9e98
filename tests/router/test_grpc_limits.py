"""Long lists over gRPC are rejected by name and count before they become Python objects."""

import tracemalloc
from typing import Any

import grpc.aio
import pytest

from contract.errors import InvalidRequestError
from contract.identity import Role
from protos import inference_pb2 as pb
from router.grpc.messages import check_detokenize, check_embed, check_generate
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.text.tiny_model import END

MANY = 2 * 10**6
IDS = [1] * MANY
BIASES = dict.fromkeys(range(2000), 1.0)


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=IDS)), "prompt"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(stop=[""] * MANY)), "stop"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(stop_token_ids=IDS)), "stop_token_ids"),
        (
            pb.GenerateRequest(text="a", sampling=pb.SamplingParams(allowed_token_ids=IDS)),
            "allowed_token_ids",
        ),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(logit_bias=BIASES)), "logit_bias"),
        (
            pb.GenerateRequest(text="a", grammar=pb.AnswerGrammar(choice=pb.Choices(texts=["a"] * MANY))),
            "grammar.choice",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_list_that_is_too_long_is_named(request_: pb.GenerateRequest, name: str) -> None:
    """M2: counting costs no memory over gRPC either."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match=f"{name} has") as caught:
            check_generate(request_, 128)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.param == name
    assert peak < 2**20


def test_inputs_and_ids_are_counted_together() -> None:
    """M2: embeddings and detokenizing."""
    half = pb.EmbedInput(token_ids=pb.TokenIds(ids=[1] * (2**19 + 1)))
    with pytest.raises(InvalidRequestError, match="inputs have"):
        check_embed(pb.EmbedRequest(inputs=[half, half]), 128)
    check_embed(pb.EmbedRequest(inputs=[half]), 128)
    with pytest.raises(InvalidRequestError, match="token_ids has"):
        check_detokenize(pb.DetokenizeRequest(token_ids=IDS))


def test_inputs_are_counted_before_they_are_read() -> None:
    """M2: four million empty inputs, two bytes each, blocked the event loop for a second and a half."""
    request = pb.EmbedRequest.FromString(pb.EmbedRequest(inputs=[pb.EmbedInput()]).SerializeToString() * MANY)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match=f"inputs has {MANY} entries"):
            check_embed(request, 128)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


async def test_the_service_refuses_them() -> None:
    """M2: each method of the public port counts first."""
    async with (
        running_cluster(Script(tokens=[END]), (Role.AGGREGATED,)) as cluster,
        cluster.channel() as channel,
    ):
        stub: Any = cluster.inference(channel)
        long_ids = pb.TokenIds(ids=IDS)
        for call, message in (
            (stub.GenerateOnce, pb.GenerateRequest(token_ids=long_ids)),
            (stub.Embed, pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=long_ids)])),
            (stub.Detokenize, pb.DetokenizeRequest(token_ids=IDS)),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="the limit is 1048576"):
                await call(message)
