"""The ``openai`` package as the reader of /v1/responses."""

import json
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.router.cluster import Cluster, running_cluster
from tests.router.test_grammars import grammars_of
from tests.router.test_responses import BYTES, PARIS, PARSERS, TEXT_EVENTS, WEATHER
from tests.router.tool_cluster import prompt_of, writing_cluster


def sdk(cluster: Cluster) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=cluster.url("/v1"), api_key="none", max_retries=0)


async def test_the_sdk_reads_whole_and_streamed_answers() -> None:
    async with running_cluster(BYTES) as cluster, sdk(cluster) as client:
        whole = await client.responses.create(model="tiny", input="hi")
        stream = await client.responses.create(model="tiny", input="hi", stream=True)
        kinds = [event.type async for event in stream]
        async with client.responses.stream(model="tiny", input="hi") as streamed:
            texts = [event.delta async for event in streamed if event.type == "response.output_text.delta"]
            final = await streamed.get_final_response()
    assert (whole.output_text, whole.status, final.output_text) == ("abc", "completed", "abc")
    assert whole.usage and whole.usage.output_tokens == 4
    assert "".join(texts) == "abc"
    assert list(dict.fromkeys(kinds)) == TEXT_EVENTS


async def test_the_sdk_parses_into_a_model(tmp_path: Path) -> None:
    class City(BaseModel):
        city: str

    async with writing_cluster(tmp_path, PARIS) as cluster, sdk(cluster) as client:
        parsed = await client.responses.parse(model="tiny", input="hi", text_format=City)
        async with client.responses.stream(model="tiny", input="hi", text_format=City) as streamed:
            final = await streamed.get_final_response()
        assert grammars_of(cluster)[0]
    assert parsed.output_parsed == final.output_parsed == City(city="Paris")


async def test_the_sdk_calls_a_function_and_goes_on(tmp_path: Path) -> None:
    text = f'<think>Hm.</think><tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
    tools: Any = [{**WEATHER, "strict": False}]
    history: list[Any] = [{"role": "user", "content": "hi"}]
    async with writing_cluster(tmp_path, text, **PARSERS) as cluster, sdk(cluster) as client:
        first = await client.responses.create(model="tiny", input=history, tools=tools)
        thought, call = first.output
        assert (thought.type, call.type) == ("reasoning", "function_call")
        assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Paris"}
        answer = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        history += [*first.output, answer]
        await client.responses.create(model="tiny", input=history, tools=tools)
        assert "assistant:  get_weather city=Paris;tool: sunny;" in prompt_of(cluster)
        async with client.responses.stream(model="tiny", input=history, tools=tools) as streamed:
            last = await streamed.get_final_response()
        assert [item.type for item in last.output] == ["reasoning", "function_call"]
