"""Fields that /v1/responses rejects by name, and fields that it accepts and ignores."""

from typing import Any

import pytest

from contract.identity import Role
from router.http.bodies.body import Body
from router.http.fields.offered_tools import OfferedTools
from router.http.responses.conversation import response_chat
from tests.router.cluster import running_cluster
from tests.router.test_bad_input import check_all
from tests.router.test_responses import ASK, BYTES, NOW, PATH, events_of

BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 7}, "input"),
    ({"input": [7]}, "input[0]"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ({"input": [{"role": "user", "content": "a"}] * 4097}, "input"),
    ({"input": [{"role": "elf", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"input": [{"type": 7}]}, "input[0].type"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": 7}]},
        "input[0].arguments",
    ),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
    ({"input": "x" * 500}, "input"),
    ({"instructions": 7}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "7"}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": "message.output_text.logprobs"}, "include"),
    ({"include": ["x"]}, "include[0]"),
    ({"include": [{}]}, "include[0]"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"stream_options": {}}, "stream_options"),
    ({"tools": {}}, "tools"),
    ({"tools": [7]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "custom", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "custom", "name": "f", "description": 7}]}, "tools[0].description"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
        "tools[0].tools[0].name",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
    ({"tools": [{**NOW, "parameters": 7}]}, "tools[0].parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tools": [NOW], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [NOW], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "tool_choice"),
    ({"text": 7}, "text"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"truncation": "middle"}, "truncation"),
    ({"text": {"format": 7}}, "text.format"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
]
REFUSED: dict[str, Any] = {
    "previous_response_id": "resp_1",
    "conversation": "conv_1",
    "background": True,
    "prompt": {"id": "p"},
    "max_tool_calls": 1,
    "max_tokens": 7,
    "messages": [],
    "response_format": {"type": "json_object"},
    "n": 2,
}


async def test_bad_input_is_named_and_no_worker_receives_it() -> None:
    async with running_cluster(BYTES, (Role.AGGREGATED,)) as cluster:
        await check_all(cluster, PATH, ASK, BAD)
        assert cluster.workers["both-0"].received.decodes == []


async def test_unsupported_fields_of_responses_are_rejected_by_name() -> None:
    refused = [({name: value}, name) for name, value in REFUSED.items()]
    async with running_cluster(BYTES, (Role.AGGREGATED,)) as cluster:
        await check_all(cluster, PATH, ASK, refused)
        _, answer = await cluster.post(PATH, {**ASK, "previous_response_id": "resp_1"})
        assert answer["error"]["code"] == "unsupported_parameter"


ASK_AGAIN = [{"role": "user", "content": "b"}]
PARTS = [{"type": "output_text", "text": "A", "annotations": [], "logprobs": []}]
THOUGHT: dict[str, Any] = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "encrypted_content": None,
    "status": "incomplete",
}
HISTORIES: list[tuple[list[dict[str, Any]], list[tuple[Any, ...]]]] = [
    ([{**THOUGHT, "content": [{"type": "reasoning_text", "text": "R"}]}], [("R", None, 0)]),
    (
        [THOUGHT, {"type": "message", "role": "assistant", "status": "incomplete", "content": PARTS}],
        [(None, "A", 0)],
    ),
    (
        [
            {"type": "message", "role": "assistant", "content": PARTS},
            {"type": "function_call", "call_id": "c", "name": "get it", "arguments": '{"a'},
            {"type": "message", "role": "assistant", "content": PARTS},
            {"type": "function_call", "call_id": "d", "name": "f", "arguments": "", "status": "incomplete"},
        ],
        [(None, "AA", 2)],
    ),
    ([{"type": "function_call", "call_id": "c", "name": "f", "arguments": '["A"]'}], [(None, None, 1)]),
]


@pytest.mark.parametrize("index", range(len(HISTORIES)))
def test_what_one_answer_consists_of_is_one_message(index: int) -> None:
    """F10: the items of an answer, also lone reasoning and broken calls, become the model's message again."""
    items, wanted = HISTORIES[index]
    body = Body({"input": [{"role": "user", "content": "a"}, *items, *ASK_AGAIN]})
    _, *found, last = response_chat(body, OfferedTools()).messages
    assert [
        (message.get("reasoning_content"), message["content"], len(message.get("tool_calls", ())))
        for message in found
    ] == wanted
    assert last["role"] == "user"


async def test_neutral_values_are_accepted_under_strict_api_too() -> None:
    body = {
        **ASK,
        **dict.fromkeys(REFUSED),
        "background": False,
        "truncation": "auto",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": None, "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "stream_options": {"include_obfuscation": False},
        "stream": True,
        "seed": 7,
        "top_k": 5,
        "stop": ["zz"],
        "timings": True,
    }
    async with running_cluster(BYTES, (Role.AGGREGATED,), strict_api=True) as cluster:
        events = await events_of(cluster, body)
        status, answer = await cluster.post(PATH, {**ASK, "text": {"formt": {}}})
        sampling = cluster.workers["both-0"].received.decodes[0].task.sampling
    assert events[-1]["response"]["kvbaton"]["timings"]["end_to_end"] > 0
    assert (sampling.seed, sampling.top_k) == (7, 5)
    assert (status, answer["error"]["param"]) == (400, "text.formt")


class Counted(str):
    """A text that counts the characters that it is concatenated with."""

    num_copied = 0

    def __radd__(self, before: str) -> str:
        Counted.num_copied += len(before)
        return Counted(f"{before}{self}")


def test_texts_behind_a_call_are_joined_once() -> None:
    """H6: each of 4,095 texts was joined to all before it, on the event loop: 7 s for 8 MB."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    texts = [{"role": "assistant", "content": Counted(f"{number:04d}")} for number in range(4000)]
    (message,) = response_chat(Body({"input": [call, *texts]}), OfferedTools()).messages
    assert message["content"] == "".join(f"{number:04d}" for number in range(4000))
    assert Counted.num_copied <= len(message["content"])
