"""/tokenize and /detokenize, their gRPC counterparts, and other paths that need no worker."""

from importlib.metadata import version
from typing import Any

import grpc
import grpc.aio
import pytest

from contract.identity import Role
from protos import inference_pb2 as pb
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.router.test_bad_input import check_error
from tests.text.tiny_model import END, byte_ids, word_id

SAY = Script(tokens=[word_id("hello"), END])
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hello"}]
CHAT_IDS = [0, 3, *byte_ids(b"a"), 1, 4, word_id("hello"), 1]
WORDS = [word_id("hello"), word_id(" world")]


async def test_a_text_is_tokenized_as_a_completion_would_be() -> None:
    async with running_cluster(SAY, (Role.AGGREGATED,)) as cluster:
        status, answer = await cluster.post("/tokenize", {"prompt": "hello world", "model": "tiny"})
        await cluster.post("/v1/completions", {"prompt": "hello world", "max_tokens": 1})
        (decode,) = cluster.workers["both-0"].received.decodes
    assert status == 200
    assert answer == {"count": 2, "max_model_len": 128, "tokens": WORDS, "token_strs": None}
    assert list(decode.task.prompt_token_ids) == answer["tokens"]


async def test_a_chat_is_tokenized_by_the_template() -> None:
    async with running_cluster(SAY) as cluster:
        _, begun = await cluster.post("/tokenize", {"messages": CHAT})
        body = {"messages": CHAT, "add_generation_prompt": False, "return_token_strs": True}
        _, whole = await cluster.post("/tokenize", body)
    assert begun["tokens"] == [*CHAT_IDS, 4]
    assert whole["tokens"] == CHAT_IDS
    assert len(whole["token_strs"]) == len(CHAT_IDS) and "hello" in whole["token_strs"]


async def test_tokens_become_text_again() -> None:
    async with running_cluster(SAY) as cluster:
        status, answer = await cluster.post("/detokenize", {"tokens": [*WORDS, END]})
        empty = await cluster.post("/detokenize", {"tokens": []})
        _, there = await cluster.post("/tokenize", {"prompt": answer["prompt"]})
    assert status == 200 and answer["prompt"].startswith("hello world<")
    assert there["tokens"] == [*WORDS, END]
    assert empty == (200, {"prompt": ""})


BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "prompt"),
    ("/tokenize", {"prompt": 7}, 400, "prompt"),
    ("/tokenize", {"messages": []}, 400, "messages"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens"),
    ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
    ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
]


async def test_bad_bodies_are_named() -> None:
    async with running_cluster(SAY) as cluster:
        for path, body, status, param in BAD:
            got, answer = await cluster.post(path, body)
            assert got == status, (path, body, answer)
            check_error(answer, status, param)


async def test_version_and_readiness() -> None:
    async with running_cluster(SAY, ()) as cluster:
        await cluster.add(Role.PREFILL)
        assert await cluster.get("/version") == (200, {"version": version("kvbaton")})
        assert (await cluster.get("/ready"))[0] == 503
        await cluster.add(Role.DECODE)
        await cluster.service.wait_ready()
        assert await cluster.get("/ready") == (200, {"status": "ok"})


async def test_grpc_tokenizes_and_lists_as_http_does() -> None:
    async with running_cluster(SAY) as cluster, cluster.channel() as channel:
        stub = cluster.inference(channel)
        tokens = await stub.Tokenize(pb.TokenizeRequest(text="hello world", model="tiny"))
        text = await stub.Detokenize(pb.DetokenizeRequest(token_ids=[*tokens.token_ids, END]))
        models = await stub.ListModels(pb.ListModelsRequest())
        _, by_http = await cluster.post("/detokenize", {"tokens": [*WORDS, END]})
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Tokenize(pb.TokenizeRequest(text="a", model="other"))
        with pytest.raises(grpc.aio.AioRpcError) as outside:
            await stub.Detokenize(pb.DetokenizeRequest(token_ids=[10**6]))
    assert list(tokens.token_ids) == WORDS
    assert text.text == by_http["prompt"]
    assert [(model.name, model.max_model_len) for model in models.models] == [("tiny", 128)]
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    assert outside.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_whole_answer_in_one_message_is_the_stream_joined() -> None:
    script = Script(tokens=[*WORDS, END], logprobs=dict.fromkeys(WORDS, -0.5))
    request = pb.GenerateRequest(
        text="hello", request_id="mine", sampling=pb.SamplingParams(seed=3, logprobs=1, max_tokens=5)
    )
    async with running_cluster(script) as cluster, cluster.channel() as channel:
        stub = cluster.inference(channel)
        whole = await stub.GenerateOnce(request)
        parts = [part async for part in stub.Generate(request)]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GenerateOnce(pb.GenerateRequest())
    (choice,) = whole.choices
    assert (whole.request_id, choice.text, choice.finish_reason) == (
        "mine",
        "hello world",
        pb.FINISH_REASON_STOP,
    )
    assert list(choice.token_ids) == [token for part in parts for token in part.choices[0].token_ids]
    assert list(choice.logprobs) == [entry for part in parts for entry in part.choices[0].logprobs]
    assert whole.usage == parts[-1].usage and whole.timings.end_to_end > 0
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
