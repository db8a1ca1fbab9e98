"""/v1/chat/completions over real sockets."""

from typing import Any

import pytest

from contract.identity import Role
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.text.tiny_model import END, byte_ids, word_id

HELLO = [word_id("hello"), word_id(" world"), END]
ASK = {"messages": [{"role": "user", "content": "hello"}]}


async def test_whole_answer() -> None:
    """A4."""
    async with running_cluster(Script(tokens=HELLO)) as cluster:
        status, answer = await cluster.post("/v1/chat/completions", {**ASK, "model": "tiny"})
    assert status == 200
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["prompt_tokens"] == 5
    assert "kvbaton" not in answer


async def test_the_prompt_is_the_template_without_added_special_tokens() -> None:
    """A6: the conversation becomes templated text, then token ids."""
    conversation = [{"role": "system", "content": "a"}, {"role": "user", "content": "hello"}]
    async with running_cluster(Script(tokens=HELLO), (Role.AGGREGATED,)) as cluster:
        await cluster.post("/v1/chat/completions", {"messages": conversation})
        (decode,) = cluster.workers["both-0"].received.decodes
    assert list(decode.task.prompt_token_ids) == [0, 2, *byte_ids(b"a"), 1, 3, word_id("hello"), 1, 4]


async def test_role_comes_first_and_once_and_the_finish_reason_last_and_once() -> None:
    async with running_cluster(Script(tokens=HELLO), (Role.AGGREGATED,)) as cluster:
        body = {**ASK, "stream_options": {"include_usage": True}}
        *chunks, usage, done = await cluster.stream("/v1/chat/completions", body)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "hello"},
        {"content": " world"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)


@pytest.mark.parametrize("asked", [{"logprobs": True, "top_logprobs": 2}, {"logprobs": True}])
async def test_logprobs_streamed_or_not(asked: dict[str, Any]) -> None:
    a, b = byte_ids(b"ab")
    script = Script(tokens=[a, byte_ids(b"\xe2")[0]], logprobs={b: -0.25, a: -0.5})
    async with running_cluster(script) as cluster:
        _, whole = await cluster.post("/v1/chat/completions", {**ASK, **asked})
        *chunks, _ = await cluster.stream("/v1/chat/completions", {**ASK, **asked})
        task = cluster.workers["prefill-0"].received.prefills[0].task
    assert task.sampling.logprobs == asked.get("top_logprobs", 0)
    content = whole["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "b", "logprob": -0.25, "bytes": [98]},
            {"token": "a", "logprob": -0.5, "bytes": [97]},
        ],
    }
    assert (content[1]["token"], content[1]["bytes"]) == ("\ufffd", [0xE2])
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for piece in pieces if piece for entry in piece["content"]] == content


@pytest.mark.parametrize("stream", [False, True])
async def test_timings_sum_to_the_whole(stream: bool) -> None:
    async with running_cluster(Script(tokens=HELLO)) as cluster:
        body = {**ASK, "timings": True}
        if stream:
            *_, last, _ = await cluster.stream("/v1/chat/completions", body)
        else:
            _, last = await cluster.post("/v1/chat/completions", body)
    timings = last["kvbaton"]["timings"]
    parts = ("queue", "prefill", "transfer", "first_decode_step", "decode")
    assert sum(timings[part] for part in parts) == timings["end_to_end"] > 0
    assert all(value >= 0 for value in timings.values())


async def test_max_completion_tokens_goes_over_max_tokens() -> None:
    async with running_cluster(Script(tokens=HELLO)) as cluster:
        body = {**ASK, "max_tokens": 3, "max_completion_tokens": 2}
        _, answer = await cluster.post("/v1/chat/completions", body)
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_neutral_fields_and_unknown_ones_are_accepted() -> None:
    """VLLM's and OpenAI's clients always send them, with values that are no-ops."""
    idle = {
        "n": 1,
        "tools": [],
        "tool_choice": None,
        "response_format": {"type": "text"},
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "logit_bias": {},
        "store": False,
        "modalities": ["text"],
        "user": "me",
        "top_k": -1,
        "what_is_this": 7,
    }
    async with running_cluster(Script(tokens=HELLO)) as cluster:
        status, answer = await cluster.post("/v1/chat/completions", {**ASK, **idle})
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "hello world")
