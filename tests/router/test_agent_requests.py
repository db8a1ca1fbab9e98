"""Requests as agents send them: tools that cannot run here, custom tools, namespaces, and items of their histories."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.cluster import Cluster
from tests.router.test_messages import PATH as MESSAGES
from tests.router.test_messages import SAY
from tests.router.test_responses import PATH as RESPONSES
from tests.router.test_responses import events_of
from tests.router.tool_cluster import CHAT, prompt_of, writing_cluster
from text.chat import readable
from text.tools import TextArgument, argument_text, as_argument

HOSTED = (
    "web_search",
    "image_generation",
    "local_shell",
    "file_search",
    "code_interpreter",
    "mcp",
    "computer_use_preview",
    "a_type_of_next_year",
)
PATCH = '*** Begin "Patch"\n+\\é😀'
CUSTOM = {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "text"}}
SHELL = {"type": "function", "name": "run", "parameters": {"type": "object", "properties": {}}}
SPACE = {"type": "namespace", "name": "files", "description": "", "tools": [SHELL, CUSTOM, {"type": "shell"}]}
LEFT_OUT = "x-kvbaton-tools-left-out"


def calling(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def headers_of(cluster: Cluster, path: str, body: dict[str, Any]) -> dict[str, str]:
    async with cluster.session.post(cluster.url(path), json=body) as response:
        assert response.status == 200, await response.text()
        return {name.lower(): value for name, value in response.headers.items()}


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_that_cannot_run_here_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """C1: one hosted tool in the list refused the whole request of an agent, on each API."""
    flat = [*({"type": kind} for kind in HOSTED), SHELL]
    nested = [*({"type": kind} for kind in HOSTED), {"type": "function", "function": {"name": "run"}}]
    mine = [{"type": kind, "name": kind} for kind in HOSTED] + [{"name": "run", "input_schema": {}}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        (RESPONSES, {"input": "hi", "tools": flat}),
        (CHAT, {"messages": SAY["messages"], "tools": nested}),
        (MESSAGES, {**SAY, "tools": mine}),
    ]
    caplog.set_level(logging.INFO)
    async with writing_cluster(tmp_path, "ok", tool_parser="hermes") as cluster:
        for path, body in bodies * 2:
            headers = await headers_of(cluster, path, {**body, "stream": stream})
            assert headers[LEFT_OUT] == ", ".join(HOSTED)
            assert prompt_of(cluster).startswith("tools: run;user: hi;")
    told = [record for record in caplog.records if "are left out of requests" in record.getMessage()]
    assert len(told) == len(HOSTED)


async def test_strict_api_leaves_nothing_out(tmp_path: Path) -> None:
    async with writing_cluster(tmp_path, "ok", strict_api=True) as cluster:
        for path, body in (
            (RESPONSES, {"input": "hi", "tools": [{"type": "web_search"}]}),
            (CHAT, {"messages": SAY["messages"], "tools": [{"type": "web_search"}]}),
            (MESSAGES, {**SAY, "tools": [{"type": "web_search", "name": "web_search"}]}),
        ):
            status, answer = await cluster.post(path, body)
            assert (status, "web_search" in answer["error"]["message"]) == (400, True), answer


async def test_calls_of_custom_tools_come_back_as_such(tmp_path: Path) -> None:
    """C1: a custom tool is a function with one string for the model, and a custom tool for the client."""
    body = {"input": "hi", "tools": [CUSTOM, SPACE]}
    async with writing_cluster(
        tmp_path, calling("patch", json.dumps({"input": PATCH})), tool_parser="hermes"
    ) as cluster:
        _, answer = await cluster.post(RESPONSES, body)
        events = await events_of(cluster, body)
        chat = {"messages": SAY["messages"], "tools": [{"type": "custom", "custom": {"name": "patch"}}]}
        _, chatted = await cluster.post(CHAT, chat)
        chunks = await cluster.stream(CHAT, chat)
        forced = {**body, "tool_choice": {"type": "custom", "name": "patch"}}
        status, refused = await cluster.post(RESPONSES, forced)
    assert status == 200, refused
    (item,) = answer["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", PATCH)
    assert item["id"].startswith("ctc_") and item["call_id"]
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCH and len(deltas) > 3
    (done,) = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == PATCH
    assert events[-1]["response"]["output"][0]["input"] == PATCH
    (call,) = chatted["choices"][0]["message"]["tool_calls"]
    assert call == {"id": call["id"], "type": "custom", "custom": {"name": "patch", "input": PATCH}}
    pieces = [
        entry
        for chunk in chunks[:-1]
        for choice in chunk["choices"]
        for entry in choice["delta"].get("tool_calls", ())
    ]
    assert pieces[0]["type"] == "custom" and pieces[0]["custom"]["name"] == "patch"
    assert "".join(piece["custom"]["input"] for piece in pieces) == PATCH


async def test_a_call_in_a_namespace_names_it(tmp_path: Path) -> None:
    """C1: the model sees one flat function, and the client its namespace."""
    answered = calling("files__run", "{}") + calling("files__patch", json.dumps({"input": "x"}))
    async with writing_cluster(tmp_path, answered, tool_parser="hermes") as cluster:
        _, answer = await cluster.post(RESPONSES, {"input": "hi", "tools": [SPACE]})
        assert prompt_of(cluster).startswith("tools: files__run files__patch;")
        await cluster.post(
            RESPONSES, {"input": [{"role": "user", "content": "hi"}, *answer["output"]], "tools": [SPACE]}
        )
        assert "assistant:  files__run files__patch input=x;" in prompt_of(cluster)
    first, second = answer["output"]
    assert [first[key] for key in ("type", "name", "namespace")] == ["function_call", "run", "files"]
    assert [second[key] for key in ("type", "name", "namespace")] == ["custom_tool_call", "patch", "files"]


IMAGE = "[input_image: left out, this model reads text only]"
ITEMS: list[tuple[list[dict[str, Any]], str]] = [
    (
        [
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        ],
        "assistant:  patch input=x;tool: done;",
    ),
    (
        [
            {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c", "output": '{"output": "a.py"}'},
        ],
        "assistant:  local_shell action={'type': 'exec', 'command': ['ls']};tool: {\"output\": \"a.py\"};",
    ),
    (
        [{"type": "web_search_call", "id": "ws", "status": "completed", "action": {"query": "moose"}}],
        "assistant:  web_search action={'query': 'moose'};"
        "tool: [web_search_call: completed, its result is not a part of the conversation];",
    ),
    (
        [{"type": "image_generation_call", "id": "ig", "result": "iVBORw0KGgo="}],
        "assistant:  image_generation;tool: [image: left out, this model reads text only];",
    ),
    (
        [
            {
                "type": "code_interpreter_call",
                "id": "ci",
                "code": "1+1",
                "outputs": [{"type": "logs", "logs": "2"}],
            }
        ],
        "assistant:  code_interpreter code=1+1;tool: 2;",
    ),
    (
        [{"type": "mcp_call", "id": "m", "name": "look", "arguments": '{"a": "b"}', "output": "seen"}],
        "assistant:  look a=b;tool: seen;",
    ),
    (
        [
            {"type": "computer_call", "call_id": "c", "action": {"type": "screenshot"}},
            {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
        ],
        "assistant:  computer action={'type': 'screenshot'};"
        "tool: [computer_screenshot: left out, this model reads text only];",
    ),
    (
        [
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [
                    {"type": "input_text", "text": "see:"},
                    {"type": "input_image", "image_url": "data:x"},
                ],
            },
        ],
        f"assistant:  look;tool: see:\n{IMAGE};",
    ),
    ([{"type": "reasoning", "summary": [], "encrypted_content": "abc"}], ""),
    ([{"type": "item_reference", "id": "rs_1"}], ""),
    (
        [{"type": "item_reference", "id": "msg_1"}],
        "user: [item_reference: left out, this model reads text only];",
    ),
    (
        [{"type": "compaction", "encrypted_content": "x"}],
        "user: [compaction: left out, this model reads text only];",
    ),
]


async def test_items_of_other_tools_are_shown_as_calls_and_results(tmp_path: Path) -> None:
    """C1: each of these in a history refused the whole request."""
    async with writing_cluster(tmp_path, "ok", tool_parser="hermes") as cluster:
        for items, shown in ITEMS:
            asked = [{"role": "user", "content": "hi"}, *items, {"role": "user", "content": "go on"}]
            status, answer = await cluster.post(RESPONSES, {"input": asked})
            assert status == 200, (items, answer)
            assert prompt_of(cluster) == f"user: hi;{shown}user: go on;assistant: "


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
BLOCKS: list[tuple[list[dict[str, Any]], str]] = [
    ([{"type": "text", "text": "see:"}, PICTURE], "see:\n[image: left out, this model reads text only]"),
    (
        [{"type": "tool_reference", "tool_name": "x"}],
        "[tool_reference: left out, this model reads text only]",
    ),
    ([{"type": "document", "source": {"type": "text", "data": "a page"}, "title": "T"}], "T\na page"),
    (
        [
            {
                "type": "search_result",
                "source": "s",
                "title": "T",
                "content": [{"type": "text", "text": "hit"}],
            }
        ],
        "T\ns\nhit",
    ),
]


async def test_results_with_images_and_references_are_shown_as_text(tmp_path: Path) -> None:
    """C1: a screenshot in a tool's result refused the conversation for good, on each API."""
    async with writing_cluster(tmp_path, "ok", tool_parser="hermes") as cluster:
        for content, shown in BLOCKS:
            called = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "t", "content": content}
            turns = [{"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
            status, answer = await cluster.post(MESSAGES, {**SAY, "messages": [*SAY["messages"], *turns]})
            assert status == 200, answer
            assert f"look;tool: {shown};" in prompt_of(cluster)
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        parts = [{"type": "text", "text": "see:"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
        chat = [
            *SAY["messages"],
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": parts},
        ]
        status, answer = await cluster.post(CHAT, {"messages": chat})
        assert status == 200, answer
        assert "tool: see:\n[image_url: left out, this model reads text only];" in prompt_of(cluster)
        status, answer = await cluster.post(CHAT, {"messages": [{"role": "user", "content": parts}]})
        assert (status, answer["error"]["param"]) == (400, "messages[0].content[1]")


async def test_hosted_calls_of_anthropic_are_calls_and_results(tmp_path: Path) -> None:
    used = [
        {"type": "text", "text": "I look."},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "moose"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": [{"type": "web_search_result", "title": "t", "encrypted_content": "x"}],
        },
        {"type": "text", "text": "Found."},
    ]
    asked = [*SAY["messages"], {"role": "assistant", "content": used}, {"role": "user", "content": "on"}]
    async with writing_cluster(tmp_path, "ok", tool_parser="hermes") as cluster:
        status, answer = await cluster.post(MESSAGES, {**SAY, "messages": asked})
        assert status == 200, answer
        assert prompt_of(cluster) == (
            "user: hi;assistant: I look. web_search query=moose;"
            "tool: [web_search_result: left out, this model reads text only];assistant: Found.;user: on;assistant: "
        )


BILLING = "x-anthropic-billing-header: cc_version=2.1.37; cc_entrypoint=cli; cch={};"


async def test_metadata_of_transport_is_not_a_part_of_the_prompt(tmp_path: Path) -> None:
    """C2: a line that differs in every request stood first, so that nothing behind it was ever cached."""

    def bodies(number: int) -> list[tuple[str, dict[str, Any]]]:
        line = BILLING.format(number)
        blocks = [{"type": "text", "text": line}, {"type": "text", "text": "Be good."}]
        return [
            (MESSAGES, {**SAY, "system": blocks}),
            (MESSAGES, {**SAY, "system": f"{line}\nBe good."}),
            (CHAT, {"messages": [{"role": "system", "content": blocks}, *SAY["messages"]]}),
            (RESPONSES, {"input": "hi", "instructions": f"{line}\n\nBe good."}),
        ]

    async with writing_cluster(tmp_path, "ok") as cluster:
        for number in range(2):
            for path, body in bodies(number):
                assert (await cluster.post(path, body))[0] == 200
                assert prompt_of(cluster) == "system: Be good.;user: hi;assistant: "
        await cluster.post(MESSAGES, {**SAY, "system": BILLING})
        assert prompt_of(cluster) == "user: hi;assistant: "
        kept = f"I ask about\n{BILLING}"
        await cluster.post(
            MESSAGES, {**SAY, "system": kept, "messages": [{"role": "user", "content": BILLING}]}
        )
        assert prompt_of(cluster) == f"system: {kept};user: {BILLING};assistant: "


async def test_the_cache_rate_of_each_key_is_published(tmp_path: Path) -> None:
    """C2: a client that defeats the prefix cache is found by its key; labels beyond 64 keys are one."""
    keys = [f"key-{number}" for number in range(66)]
    cached = {"num_cached_tokens": 4}
    async with writing_cluster(tmp_path, "ok", api_keys=",".join(keys), script=cached) as cluster:
        for key in keys:
            headers = {"Authorization": f"Bearer {key}"}
            status, answer = await cluster.post(CHAT, {"messages": SAY["messages"]}, headers=headers)
            assert status == 200, answer
        found = await cluster.metrics()
    shown = {
        name: value for name, value in found.items() if name.startswith("kvbaton_key_cached_tokens_total")
    }
    assert len(shown) == 65 and sum(shown.values()) == 4 * len(keys)
    assert shown['kvbaton_key_cached_tokens_total{key="other"}'] == 8
    digest = hashlib.sha256(b"key-0").hexdigest()[:12]
    assert shown[f'kvbaton_key_cached_tokens_total{{key="{digest}"}}'] == 4
    assert found[f'kvbaton_key_prompt_tokens_total{{key="{digest}"}}'] == answer["usage"]["prompt_tokens"]


TEXT = st.text(st.sampled_from('ab"\\/\n\té😀{}u0'), max_size=20)


@settings(max_examples=300)
@given(TEXT, st.lists(st.integers(1, 5), min_size=1, max_size=60), st.booleans())
def test_a_custom_tools_text_is_decoded_in_pieces(text: str, sizes: list[int], is_ascii: bool) -> None:
    """However its JSON is cut, the pieces of the text are the text."""
    written = json.dumps({"input": text}, ensure_ascii=is_ascii)
    argument = TextArgument()
    found, begin = "", 0
    for size in [*sizes, len(written)]:
        found += argument.push(written[begin : begin + size])
        begin += size
    assert found + argument.flush() == text == argument_text(as_argument(text))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [("*** raw", "*** raw"), ('{"other": 1}', '{"other": 1}'), ('{"input": "cut', "cut"), ("", "")],
)
def test_arguments_of_another_form_are_the_text(arguments: str, text: str) -> None:
    assert argument_text(arguments) == text


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "source", "content", "data", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(JSON)
def test_every_result_has_a_text(value: Any) -> None:
    assert isinstance(readable(value), str)
