"""An answer with any content is accepted as history, and answered: on every path, whole and streamed."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter

from protos import worker_pb2 as pb
from tests.router.cluster import Cluster
from tests.router.test_messages import NOW as CLIENT_NOW
from tests.router.test_messages import WEATHER as CLIENT_WEATHER
from tests.router.test_messages import events_of, streamed, without_ids
from tests.router.tool_cluster import CHAT, NOW, TEMPLATE, WEATHER, writing_cluster
from tests.text.tiny_model import END, byte_ids

Json = dict[str, Any]
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
USER = {"role": "user", "content": "hi"}
CONCATENATING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %};{% endfor %}"
)
"""A template that needs the arguments of calls as text."""
SIMPLE = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '</>' }}{% endfor %}"
"""A template for contents only, as strings."""
TEMPLATES = {"items": TEMPLATE, "text": CONCATENATING, "simple": SIMPLE}
ARGUMENTS = [
    '{"city": "Paris"}',
    '{"a": "x\ny"}',
    '{"a": NaN}',
    '{"a": 1,}',
    '["A"]',
    "{}",
    "null",
    '"s"',
    '{"a": "\\ud83d',
]
NAMES = ["get_weather", "now", "get weather", "näme!", "a" * 200, "other", "<x>"]
MARKUP = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"),
    *("<function=now>", "<function=get_weather>", "<function=x y>", "</function>"),
    *(
        "<parameter=city>",
        "<parameter=>",
        "</parameter>",
        "[",
        "]",
        ";",
        "{",
        "}",
        '"',
        "\n",
        " ",
        "Ok, 世界.",
        "\u2028",
    ),
]


def _call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": {arguments}}}'


CALLS = st.builds(
    _call, st.sampled_from(NAMES), st.sampled_from(ARGUMENTS), st.sampled_from(["arguments", "parameters"])
)
QWEN = st.builds(
    "<tool_call>\n<function={}>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>".format,
    st.sampled_from(["get_weather", "now", "a/b"]),
    st.sampled_from(ARGUMENTS),
)
WHOLE_CALLS = st.one_of(
    CALLS.map("<tool_call>{}</tool_call>".format),
    CALLS.map("<|python_tag|>{}".format),
    CALLS.map("[TOOL_CALLS][{}]".format),
    st.sampled_from(ARGUMENTS).map("[TOOL_CALLS]now[ARGS]{}".format),
    QWEN,
)
TEXTS = st.lists(
    st.one_of(st.sampled_from(MARKUP), st.sampled_from(ARGUMENTS), CALLS, WHOLE_CALLS, st.text(max_size=5)),
    max_size=6,
).map("".join)
ANSWERS = st.builds(
    "{}{}".format, st.sampled_from(["", "<think>Hm.</think>", "<think>", "<think></think>"]), TEXTS
)
CHOICES = st.sampled_from([None, None, "auto", "required", "named"])


ITEMS: TypeAdapter[list[ResponseOutputItem]] = TypeAdapter(list[ResponseOutputItem])


def _typed_message(message: Json) -> Json:
    return {name: message[name] for name in ("role", "content", "tool_calls") if name in message}


CHAT_CLIENTS: dict[str, Callable[[Json], Json]] = {
    "as it is": lambda message: message,
    "with every null": lambda message: (
        ChatCompletion.model_validate(_completion(message)).choices[0].message.model_dump()
    ),
    "without nulls": lambda message: {name: value for name, value in message.items() if value is not None},
    "known fields alone": _typed_message,
}
RESPONSE_CLIENTS: dict[str, Callable[[Json], list[Json]]] = {
    "as it is": lambda response: response["output"],
    "with every null": lambda response: [
        item.model_dump() for item in ITEMS.validate_python(response["output"])
    ],
    "without nulls": lambda response: [
        item.model_dump(exclude_none=True) for item in ITEMS.validate_python(response["output"])
    ],
    "encrypted": lambda response: [{**item, "encrypted_content": None} for item in response["output"]],
}


def _completion(message: Json) -> Json:
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "tiny", "choices": [choice]}


async def _posted(cluster: Cluster, path: str, body: Json) -> Json:
    status, answer = await cluster.post(path, body)
    assert status == 200, (body, answer)
    return answer


def _chat_streamed(chunks: list[Any]) -> Json:
    """The message as the ``openai`` package puts it together."""
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in chunks[:-1]:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    return dict(state.current_completion_snapshot.choices[0].message.model_dump())


def _chat_results(message: Json) -> list[Json]:
    calls = message.get("tool_calls") or ()
    return [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in calls]


async def _chat_comes_back(cluster: Cluster, body: Json, client: str) -> None:
    whole = (await _posted(cluster, CHAT, body))["choices"][0]["message"]
    streamed = _chat_streamed(await cluster.stream(CHAT, body))
    for message in (whole, streamed):
        history = [*body["messages"], CHAT_CLIENTS[client](message), *_chat_results(message), USER]
        again = (await _posted(cluster, CHAT, {**body, "messages": history}))["choices"][0]["message"]
        history += [again, *_chat_results(again)]
        await _posted(cluster, CHAT, {**body, "messages": history, "tools": [WEATHER], "tool_choice": "none"})


async def _response_streamed(cluster: Cluster, body: Json) -> Json:
    async with cluster.session.post(cluster.url(RESPONSES), json={**body, "stream": True}) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    events = [json.loads(event.partition("data: ")[2]) for event in text.strip().split("\n\n")]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    last: Json = events[-1]["response"]
    assert done == last["output"]
    return last


def _response_results(items: list[Json]) -> list[Json]:
    calls = [item["call_id"] for item in items if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": call_id, "output": "4"} for call_id in calls]


async def _response_comes_back(cluster: Cluster, body: Json, client: str) -> None:
    for response in (await _posted(cluster, RESPONSES, body), await _response_streamed(cluster, body)):
        items = RESPONSE_CLIENTS[client](response)
        history = [*body["input"], *items, *_response_results(items), USER]
        again = (await _posted(cluster, RESPONSES, {**body, "input": history}))["output"]
        await _posted(cluster, RESPONSES, {**body, "input": [*history, *again, *_response_results(again)]})


async def _message_comes_back(cluster: Cluster, body: Json) -> None:
    whole = await _posted(cluster, MESSAGES, body)
    last = streamed(await events_of(cluster, body))
    assert without_ids(last) == without_ids(whole)
    for message in (whole, last):
        history = [
            *body["messages"],
            {"role": "assistant", "content": message["content"]},
            _user_turn(message),
        ]
        again = await _posted(cluster, MESSAGES, {**body, "messages": history})
        history += [{"role": "assistant", "content": again["content"]}, _user_turn(again)]
        counted = await _posted(cluster, f"{MESSAGES}/count_tokens", {"messages": history})
        assert counted["input_tokens"] > 0


def _user_turn(message: Json) -> Json:
    calls = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call_id, "content": "4"} for call_id in calls]
    return {"role": "user", "content": [*results, {"type": "text", "text": "hi"}]}


def _message_body(choice: str | None, max_tokens: int) -> Json:
    named = {"type": "tool", "name": "get_weather"}
    kinds = {"auto": {"type": "auto"}, "required": {"type": "any"}, "named": named}
    body = {"messages": [USER], "tools": [CLIENT_WEATHER, CLIENT_NOW], "max_tokens": max_tokens}
    return body if choice is None else {**body, "tool_choice": kinds[choice]}


def _chat_body(choice: str | None, max_tokens: int) -> Json:
    named = {"type": "function", "function": {"name": "get_weather"}}
    body = {"messages": [USER], "tools": [WEATHER, NOW], "max_tokens": max_tokens}
    return body if choice is None else {**body, "tool_choice": named if choice == "named" else choice}


def _response_body(choice: str | None, max_tokens: int) -> Json:
    tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, NOW)]  # type: ignore[dict-item]
    named = {"type": "function", "name": "get_weather"}
    body = {"input": [USER], "tools": tools, "max_output_tokens": max_tokens}
    return body if choice is None else {**body, "tool_choice": named if choice == "named" else choice}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "family",
    ["mistral", *(pytest.param(family, marks=pytest.mark.slow) for family in ("hermes", "qwen", "llama3"))],
)
async def test_any_answer_can_be_sent_back_and_is_answered(
    family: str, template: str, tmp_path: Path
) -> None:
    """F10: the service refused its own answers as history, for the rest of the conversation."""
    loop = asyncio.get_running_loop()
    answer: list[int] = []

    def script(_: pb.Task) -> Json:
        return {"tokens": [*answer, END], "tokens_per_step": 7}

    parsers: Any = {"tool_parser": family, "reasoning_parser": "think", "template": TEMPLATES[template]}
    async with writing_cluster(tmp_path, "", script=script, **parsers) as cluster:

        async def check(choice: str | None, max_tokens: int, chat_client: str, response_client: str) -> None:
            await _chat_comes_back(cluster, _chat_body(choice, max_tokens), chat_client)
            await _response_comes_back(cluster, _response_body(choice, max_tokens), response_client)
            await _message_comes_back(cluster, _message_body(choice, max_tokens))

        @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
        @given(
            text=ANSWERS,
            choice=CHOICES,
            max_tokens=st.integers(1, 200),
            chat_client=st.sampled_from(sorted(CHAT_CLIENTS)),
            response_client=st.sampled_from(sorted(RESPONSE_CLIENTS)),
        )
        def ask(text: str, **drawn: Any) -> None:
            answer[:] = byte_ids(text.encode("utf-8", "replace"))
            asyncio.run_coroutine_threadsafe(check(**drawn), loop).result()

        await asyncio.to_thread(ask)
