"""Every bad input gets OpenAI's error object, and no worker receives it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from contract.identity import Role
from protos.worker_pb2 import Credit
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.text.tiny_model import END, model_files, write_model

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SAY = {"messages": [{"role": "user", "content": "hello"}]}

FUNCTION = {"type": "function", "function": {"name": "f"}}

BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "elf", "content": "a"}]}, "messages[0].role"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": -(10**400)}, "top_p"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "s"}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": 7}, "stop"),
    ({"stop": ["a", 7]}, "stop"),
    ({"stop_token_ids": 7}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [3, 2**31 - 1]}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 7}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"priority": "high"}, "priority"),
    ({"priority": 2**31}, "priority"),
    ({"cache_salt": 7}, "cache_salt"),
    ({"cache_salt": "s" * 1025}, "cache_salt"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"model": 7}, "model"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"n": 0}, "n"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"presence_penalty": "much"}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 10.5}, "repetition_penalty"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"5": 10**400}}, "logit_bias"),
    ({"logit_bias": {"300": 1}}, "logit_bias"),
    ({"allowed_token_ids": 7}, "allowed_token_ids"),
    ({"allowed_token_ids": [300]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"tools": 7}, "tools"),
    ({"tools": [FUNCTION, FUNCTION, {"type": "function", "function": {}}]}, "tools[2].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tools": [FUNCTION], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"documents": "d"}, "documents"),
    ({"documents": ["d"]}, "documents"),
    ({"chat_template_kwargs": 7}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"continue_final_message": 1}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (
        {"continue_final_message": True, "messages": [{"role": "user", "content": " "}]},
        "continue_final_message",
    ),
]
BAD_TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [[5], [300]]}, "prompt"),
    ({"prompt": [[5], [[6]]]}, "prompt"),
    ({"prompt": ["a"] * 2049}, "prompt"),
    ({"prompt": [5, "a"]}, "prompt"),
    ({"prompt": [5, True]}, "prompt"),
    ({"prompt": [5, 300]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"suffix": "x"}, "suffix"),
    ({"n": 3, "prompt": ["a"] * 700}, "n"),
    ({"tools": [FUNCTION]}, "tools"),
    ({"continue_final_message": True}, "continue_final_message"),
]
LATER: list[dict[str, Any]] = [
    {"functions": [{}]},
    {"audio": {"voice": "x"}},
    {"modalities": ["text", "audio"]},
    {"system": "Be brief."},
    {"instructions": "Be brief."},
    {"text": {"format": {"type": "json_object"}}},
    {"json_schema": {"type": "object"}},
    {"grammar": 'root ::= "a"'},
    {"regex": "a+"},
    {"stop_sequences": ["a"]},
    {"max_output_tokens": 7},
    {"web_search_options": {}},
    {"guided_whitespace_pattern": " ?"},
    {"lora_request": {"lora_name": "a"}},
    {"lora_path": "a"},
    {"prompt_adapter_request": {"prompt_adapter_name": "a"}},
    {"mm_processor_kwargs": {"num_crops": 4}},
]


def check_error(answer: dict[str, Any], status: int, param: str | None) -> dict[str, Any]:
    """Check that the error object is complete, has the right type, and names the parameter."""
    error: dict[str, Any] = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["param"] == param, error
    assert error["message"]
    return error


async def check_all(
    cluster: Cluster, path: str, base: dict[str, Any], cases: list[tuple[dict[str, Any], str]]
) -> None:
    for fields, param in cases:
        status, answer = await cluster.post(path, {**base, **fields})
        assert status == 400, (fields, answer)
        check_error(answer, status, param)


async def test_fields_of_wrong_type_or_range_are_named() -> None:
    async with running_cluster(Script(tokens=[END]), (Role.AGGREGATED,)) as cluster:
        await check_all(cluster, CHAT, SAY, BAD_CHATS)
        await check_all(cluster, TEXT, {"prompt": "hello"}, BAD_TEXTS)
        assert cluster.workers["both-0"].received.decodes == []


async def test_unsupported_fields_are_rejected_by_name() -> None:
    """A choice: a constraint that the client sent, also under the name of another API, is never silently ignored."""
    async with running_cluster(Script(tokens=[END]), (Role.AGGREGATED,)) as cluster:
        for fields in LATER:
            *_, name = fields
            status, answer = await cluster.post(CHAT, {**SAY, **fields})
            error = check_error(answer, status, name)
            assert (status, error["code"]) == (400, "unsupported_parameter"), fields
            assert "not served by this version" in error["message"]
        assert cluster.workers["both-0"].received.decodes == []


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, "unsupported_parameter"),
        ({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, "unsupported_parameter"),
        ({"type": "text"}, None),
        ({"text": "a"}, None),
    ],
)
async def test_a_part_of_a_message_that_is_not_text_is_named(part: dict[str, Any], code: str | None) -> None:
    content = [{"type": "text", "text": "What is this?"}, part]
    async with running_cluster(Script(tokens=[END]), (Role.AGGREGATED,)) as cluster:
        status, answer = await cluster.post(CHAT, {"messages": [{"role": "user", "content": content}]})
        error = check_error(answer, 400, "messages[0].content[1]")
    assert (status, error["code"]) == (400, code)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "a"', "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
        (b"[" * 50_000, "not valid JSON"),
        (b'{"temperature": ' + b"[" * 200 + b"]" * 200 + b"}", "nested deeper than 100"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "stop": "\\udfffx"}', "surrogate"),
        (b'{"prompt": "a", "stop": "\\ud83d-\\ude00"}', "surrogate"),
    ],
)
async def test_malformed_json_is_400(body: bytes, words: str) -> None:
    async with (
        running_cluster(Script(tokens=[END]), (Role.AGGREGATED,)) as cluster,
        cluster.session.post(
            cluster.url(TEXT), data=body, headers={"Content-Type": "application/json"}
        ) as response,
    ):
        assert response.status == 400
        assert words in check_error(await response.json(), 400, None)["message"]


async def test_a_body_with_a_wrong_content_encoding_is_400() -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with (
        running_cluster(Script(tokens=[END]), (Role.AGGREGATED,)) as cluster,
        cluster.session.post(cluster.url(TEXT), data=b'{"prompt": "a"}', headers=headers) as response,
    ):
        assert response.status == 400
        assert "Content-Encoding" in check_error(await response.json(), 400, None)["message"]


async def test_a_whole_surrogate_pair_is_fine() -> None:
    async with (
        running_cluster(Script(tokens=[END]), (Role.AGGREGATED,)) as cluster,
        cluster.session.post(
            cluster.url(TEXT),
            data=b'{"prompt": "\\ud83d\\ude00"}',
            headers={"Content-Type": "application/json; charset=utf-8"},
        ) as response,
    ):
        assert response.status == 200
        assert (await response.json())["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
async def test_another_content_type_is_415(content_type: str) -> None:
    async with (
        running_cluster(Script(tokens=[END]), (Role.AGGREGATED,)) as cluster,
        cluster.session.post(
            cluster.url(TEXT), data=b'{"prompt": "a"}', headers={"Content-Type": content_type}
        ) as response,
    ):
        assert response.status == 415
        assert (
            f"is {content_type or 'missing'}; send"
            in check_error(await response.json(), 415, None)["message"]
        )


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_oversized_body_is_413(chunked: bool) -> None:
    body = b'{"prompt": "' + b"a" * 5000 + b'"}'

    async def pieces() -> Any:
        for start in range(0, len(body), 500):
            yield body[start : start + 500]

    async with (
        running_cluster(Script(tokens=[END]), (Role.AGGREGATED,), max_body_bytes=2048) as cluster,
        cluster.session.post(
            cluster.url(TEXT),
            data=pieces() if chunked else body,
            headers={"Content-Type": "application/json"},
        ) as response,
    ):
        assert response.status == 413
        assert "2048 bytes" in check_error(await response.json(), 413, None)["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_404(path: str, stream: bool) -> None:
    async with running_cluster(Script(tokens=[END]), (Role.AGGREGATED,)) as cluster:
        status, answer = await cluster.post(
            path, {**SAY, "prompt": "hello", "model": "gpt-0", "stream": stream}
        )
        assert status == 404
        error = check_error(answer, 404, "model")
        assert error["code"] == "model_not_found"
        assert "`gpt-0`" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "asked"),
    [
        (TEXT, {"prompt": [5] * 128}, "prompt", "129 tokens (128 in the prompt, 1 in the completion)"),
        (TEXT, {"prompt": [5] * 100, "max_tokens": 29}, "prompt", "129 tokens"),
        (TEXT, {"prompt": [5] * 100, "max_tokens": 29, "stream": True}, "prompt", "129 tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 500}]}, "messages", "505 tokens"),
        (CHAT, {**SAY, "max_completion_tokens": 124}, "messages", "129 tokens"),
    ],
)
async def test_too_long_is_context_length_exceeded(
    path: str, fields: dict[str, Any], param: str, asked: str
) -> None:
    async with running_cluster(Script(tokens=[END]), (Role.AGGREGATED,), strict_api=True) as cluster:
        status, answer = await cluster.post(path, fields)
        error = check_error(answer, status, param)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].startswith(
            "This model's maximum context length is 128 tokens. However, you requested "
        )
        assert asked in error["message"]
        assert cluster.workers["both-0"].received.decodes == []


async def test_unknown_paths_and_methods() -> None:
    async with running_cluster(Script(tokens=[END]), (Role.AGGREGATED,)) as cluster:
        status, answer = await cluster.get("/v1/nothing")
        assert status == 404
        check_error(answer, 404, None)
        async with cluster.session.get(cluster.url(CHAT)) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert response.headers["x-kvbaton-request-id"]
            check_error(await response.json(), 405, None)


async def test_no_worker_is_503() -> None:
    async with running_cluster(Script(tokens=[END]), ()) as cluster:
        status, answer = await cluster.post(CHAT, SAY)
        assert status == 503
        assert check_error(answer, 503, None)["code"] == "unavailable"
        assert await cluster.get("/v1/models") == (200, {"object": "list", "data": []})
        assert (await cluster.get("/health"))[0] == 503
        await cluster.add(Role.PREFILL)
        status, health = await cluster.get("/health")
        assert (status, health["reason"]) == (503, "no decode worker is attached")


async def test_a_chat_with_a_model_without_chat_template_is_400(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain", model_files() | {"tokenizer_config.json": b"{}"})
    async with running_cluster(Script(tokens=[END]), (Role.AGGREGATED,), model=folder) as cluster:
        status, answer = await cluster.post(CHAT, SAY)
        assert status == 400
        assert "no chat template" in check_error(answer, 400, "messages")["message"]
        assert (await cluster.post(TEXT, {"prompt": "hello", "model": "plain"}))[0] == 200


async def test_more_requests_than_max_queue_are_429() -> None:
    script = Script(tokens=[END], stall_at=0)
    async with running_cluster(script, (Role.AGGREGATED,), max_queue=1) as cluster:
        first = asyncio.create_task(cluster.post(TEXT, {"prompt": "hello"}))
        await cluster.workers["both-0"].received.wait_for(lambda worker: len(worker.decodes) == 1)
        cluster.workers["both-0"].stream.grant(Credit(max_requests=1, max_tokens=100))
        await cluster.until(lambda state: state["workers"][0]["max_requests"] == 1)
        second = asyncio.create_task(cluster.post(TEXT, {"prompt": "hello"}))
        await cluster.until(lambda state: state["num_in_line"] == 1)
        async with cluster.session.post(cluster.url(TEXT), json={"prompt": "hello"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        second.cancel()
        first.cancel()
