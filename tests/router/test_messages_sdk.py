"""The ``anthropic`` package as the reader of /v1/messages."""

from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from contract.identity import Role
from tests.router.cluster import Cluster, running_cluster
from tests.router.test_messages import KEY, NOW, PARSERS, WEATHER
from tests.router.test_responses import BYTES
from tests.router.tool_cluster import prompt_of, writing_cluster

HI: list[Any] = [{"role": "user", "content": "hi"}]
CALL = '<think>Hm.</think><tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


def sdk(cluster: Cluster, key: str = "none") -> AsyncAnthropic:
    return AsyncAnthropic(base_url=cluster.url("").removesuffix("/"), api_key=key, max_retries=0)


async def test_the_sdk_reads_whole_and_streamed_answers() -> None:
    async with running_cluster(BYTES, api_keys=KEY) as cluster, sdk(cluster, KEY) as client:
        whole = await client.messages.create(model="tiny", max_tokens=9, messages=HI, system="S")
        raw = await client.messages.create(model="tiny", max_tokens=9, messages=HI, stream=True)
        kinds = [event.type async for event in raw]
        async with client.messages.stream(model="tiny", max_tokens=9, messages=HI) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
    (block,) = whole.content
    assert block.type == "text" and block.text == text == "abc"
    assert whole.stop_reason == final.stop_reason == "end_turn"
    assert whole.usage.output_tokens == final.usage.output_tokens == 4
    assert final.usage.input_tokens > 0
    assert whole._request_id == whole.id
    assert list(dict.fromkeys(kinds)) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_the_sdk_stops_at_a_sequence() -> None:
    async with running_cluster(BYTES) as cluster, sdk(cluster) as client:
        message = await client.messages.create(
            model="tiny",
            max_tokens=9,
            messages=HI,
            stop_sequences=["c"],
            extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9},
        )
        sampling = cluster.workers["prefill-0"].received.prefills[0].task.sampling
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "c")
    assert (sampling.temperature, sampling.top_k) == (0.5, 5)


async def test_the_sdk_calls_a_tool_and_goes_on(tmp_path: Path) -> None:
    tools: Any = [WEATHER, NOW]
    history = list(HI)
    async with writing_cluster(tmp_path, CALL, **PARSERS) as cluster, sdk(cluster) as client:
        first = await client.messages.create(model="tiny", max_tokens=300, messages=history, tools=tools)
        async with client.messages.stream(
            model="tiny", max_tokens=300, messages=history, tools=tools
        ) as stream:
            streamed = await stream.get_final_message()
        for message in (first, streamed):
            thought, call = message.content
            assert thought.type == "thinking" and thought.thinking == "Hm."
            assert call.type == "tool_use" and call.input == {"city": "Paris"}
            assert message.stop_reason == "tool_use"
            history.append({"role": "assistant", "content": message.content})
            result = {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": [{"type": "text", "text": "sunny"}],
            }
            history.append({"role": "user", "content": [result]})
        await client.messages.create(model="tiny", max_tokens=300, messages=history, tools=tools)
        assert "get_weather city=Paris;tool: sunny;" in prompt_of(cluster)
        count = await client.messages.count_tokens(model="tiny", messages=history, tools=tools)
        tokens = cluster.workers["prefill-0"].received.prefills[-1].task.prompt_token_ids
    assert count.input_tokens == len(tokens)


async def test_the_sdk_raises_the_error_of_each_kind() -> None:
    async with running_cluster(BYTES, (Role.AGGREGATED,), api_keys=KEY) as cluster:
        async with sdk(cluster, "sk-wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="tiny", max_tokens=9, messages=HI)
        async with sdk(cluster, KEY) as client:
            with pytest.raises(anthropic.BadRequestError, match="max_tokens") as refused:
                await client.messages.create(model="tiny", max_tokens=0, messages=HI)
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(model="other", max_tokens=9, messages=HI)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.request_id


async def test_the_sdk_reads_structured_output(tmp_path: Path) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": {"type": "object", "properties": {}}}}
    async with writing_cluster(tmp_path, "{}") as cluster, sdk(cluster) as client:
        message = await client.messages.create(model="tiny", max_tokens=9, messages=HI, output_config=form)
        assert cluster.workers["prefill-0"].received.prefills[0].task.sampling.HasField("grammar")
    assert message.content[0].type == "text"
