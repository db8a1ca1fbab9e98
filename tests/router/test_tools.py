"""Tools in /v1/chat/completions: the prompt that describes them, and the objects of calls."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.identity import Role
from contract.outputs import FinishReason
from protos import worker_pb2 as pb
from router.settings import RouterSettings
from tests.router.tool_cluster import (
    ASK,
    CHAT,
    LENGTH,
    NOW,
    WEATHER,
    choices,
    first_special,
    joined,
    prompt_of,
    writing_cluster,
)
from tests.text.tiny_model import byte_ids

PARIS = '{"city": "Paris"}'
FORMATS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "llama3": f'{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}',
    "mistral": f'[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS][{{"name": "now", "arguments": {{}}}}]',
}


def functions(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("tokens_per_step", [1, 7, 1000])
@pytest.mark.parametrize("parser", FORMATS)
async def test_calls_of_every_format_whole_and_streamed(
    parser: str, tokens_per_step: int, tmp_path: Path
) -> None:
    script = {"tokens_per_step": tokens_per_step}
    async with writing_cluster(tmp_path, FORMATS[parser], script=script, tool_parser=parser) as cluster:
        status, whole = await cluster.post(CHAT, ASK)
        streamed = joined(await cluster.stream(CHAT, ASK))
    assert status == 200
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == streamed["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["role"], message["content"], message["refusal"]) == ("assistant", None, None)
    assert functions(message["tool_calls"]) == [("get_weather", PARIS), ("now", "{}")]
    assert functions(streamed["calls"]) == functions(message["tool_calls"])
    assert streamed["content"] == ""
    ids = [call["id"] for call in [*message["tool_calls"], *streamed["calls"]]]
    assert len(set(ids)) == 4
    assert all(one.startswith("call_") for one in ids) or parser == "mistral"
    assert {call["type"] for call in message["tool_calls"]} == {"function"}


async def test_content_before_calls_and_arguments_as_they_come(tmp_path: Path) -> None:
    text = f'Let me see.\n<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
    async with writing_cluster(tmp_path, text, tool_parser="hermes") as cluster:
        _, whole = await cluster.post(CHAT, ASK)
        found = choices(await cluster.stream(CHAT, ASK))
    message = whole["choices"][0]["message"]
    assert (message["content"], functions(message["tool_calls"])) == ("Let me see.", [("get_weather", PARIS)])
    assert found[0]["delta"] == {"role": "assistant", "content": ""}
    calls = [choice["delta"]["tool_calls"][0] for choice in found if "tool_calls" in choice["delta"]]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert [call["function"]["arguments"] for call in calls[1:]] == list(PARIS), "one byte a token"
    assert [choice["finish_reason"] for choice in found[-2:]] == [None, "tool_calls"]
    assert found[-1]["delta"] == {}


async def test_without_a_call_the_answer_is_text_to_the_last_character(tmp_path: Path) -> None:
    text = 'No <tool_call> needed.\n{"a": 1} \n'
    async with writing_cluster(tmp_path, text, tool_parser="hermes") as cluster:
        _, whole = await cluster.post(CHAT, ASK)
        streamed = joined(await cluster.stream(CHAT, ASK))
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert streamed == {"content": text, "calls": [], "finish_reason": "stop"}


async def test_a_call_that_max_tokens_cuts_keeps_its_reason(tmp_path: Path) -> None:
    text = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
    cut = len(text) - len('"Paris"}}</tool_call>')
    async with writing_cluster(tmp_path, text, tool_parser="hermes") as cluster:
        _, whole = await cluster.post(CHAT, {**ASK, "max_tokens": cut})
        streamed = joined(await cluster.stream(CHAT, {**ASK, "max_tokens": cut}))
        _, early = await cluster.post(CHAT, {**ASK, "max_tokens": 20})
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == streamed["finish_reason"] == FinishReason.LENGTH
    expected = [("get_weather", '{"city": ')]
    assert functions(choice["message"]["tool_calls"]) == functions(streamed["calls"]) == expected
    assert early["choices"][0]["message"]["content"] == text[:20], "no call has begun: nothing is lost"


async def test_the_template_gets_tools_and_arguments_as_objects(tmp_path: Path) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}
    conversation = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    async with writing_cluster(tmp_path, "Sunny.", tool_parser="hermes") as cluster:
        status, answer = await cluster.post(CHAT, {**ASK, "messages": conversation})
        prompt = prompt_of(cluster)
        _, counted = await cluster.post("/tokenize", {**ASK, "messages": conversation})
    assert status == 200
    assert (
        prompt == "tools: get_weather now;user: hi;assistant:  get_weather city=Paris;tool: sunny;assistant: "
    )
    assert counted["count"] == answer["usage"]["prompt_tokens"]


async def test_with_tool_choice_none_tools_are_neither_shown_nor_parsed(tmp_path: Path) -> None:
    async with writing_cluster(tmp_path, FORMATS["hermes"], tool_parser="hermes") as cluster:
        _, answer = await cluster.post(CHAT, {**ASK, "tool_choice": "none"})
        assert prompt_of(cluster) == "user: hi;assistant: "
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (FORMATS["hermes"], "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_without_parallel_tool_calls_there_is_one(stream: bool, tmp_path: Path) -> None:
    body = {**ASK, "parallel_tool_calls": False}
    async with writing_cluster(tmp_path, FORMATS["hermes"], tool_parser="hermes") as cluster:
        if stream:
            calls = joined(await cluster.stream(CHAT, body))["calls"]
        else:
            calls = (await cluster.post(CHAT, body))[1]["choices"][0]["message"]["tool_calls"]
    assert functions(calls) == [("get_weather", PARIS)]


async def test_auto_finds_the_format_in_the_template(tmp_path: Path) -> None:
    template = '{{ messages[0].content }}{# {"name": f, "arguments": a} in <tool_call> tags #}'
    async with writing_cluster(tmp_path, FORMATS["hermes"], template=template) as cluster:
        _, answer = await cluster.post(CHAT, ASK)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("settings", [{}, {"tool_parser": "none"}])
async def test_without_a_known_format_tools_are_shown_and_nothing_is_parsed(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """A choice: tools sent to a model without a known format were 400, with history only as well."""
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    called = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]
    async with writing_cluster(tmp_path, text, **settings) as cluster:
        for fields in (
            {},
            {"tool_choice": "auto"},
            {"messages": history},
            {"messages": history, "tools": []},
        ):
            status, answer = await cluster.post(CHAT, {**ASK, **fields})
            assert status == 200, answer
            message = answer["choices"][0]["message"]
            assert (message["content"], "tool_calls" in message) == (text, False)
            assert prompt_of(cluster).startswith("tools: get_weather now;") == ("tools" not in fields)
        assert (await cluster.post(CHAT, {**ASK, "tool_choice": "none"}))[0] == 200
        assert not prompt_of(cluster).startswith("tools:")


NAMED = {"type": "function", "function": {"name": "get_weather"}}
FORCED: list[tuple[Any, str, list[tuple[str, str]], str]] = [
    (
        "required",
        f'[{{"name": "get_weather", "parameters": {PARIS}}}, {{"name": "now", "parameters": {{}}}}]',
        [("get_weather", PARIS), ("now", "{}")],
        "tool_calls",
    ),
    (NAMED, PARIS, [("get_weather", PARIS)], "stop"),
]


@pytest.mark.parametrize(("choice", "text", "calls", "reason"), FORCED, ids=["required", "named"])
@pytest.mark.parametrize("settings", [{"tool_parser": "hermes"}, {"tool_parser": "none"}])
async def test_forced_calls_are_held_to_their_schema_and_read(
    choice: Any,
    text: str,
    calls: list[tuple[str, str]],
    reason: str,
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    body = {**ASK, "tool_choice": choice}
    async with writing_cluster(tmp_path, text, **settings) as cluster:
        status, whole = await cluster.post(CHAT, body)
        streamed = joined(await cluster.stream(CHAT, body))
        grammar = cluster.workers["prefill-0"].received.prefills[0].task.sampling.grammar
    assert status == 200
    (answer,) = whole["choices"]
    assert answer["finish_reason"] == streamed["finish_reason"] == reason
    assert functions(answer["message"]["tool_calls"]) == functions(streamed["calls"]) == calls
    assert answer["message"]["content"] is None
    assert grammar.kind == "json_schema"
    schema = json.loads(grammar.text)
    if choice is NAMED:
        assert schema["properties"] == {"city": {"type": "string"}}
    else:
        assert set(schema["$defs"]) == {"get_weather", "now"} and "maxItems" not in schema


async def test_one_call_where_they_may_not_be_several(tmp_path: Path) -> None:
    async with writing_cluster(tmp_path, "[]", tool_parser="hermes") as cluster:
        await cluster.post(CHAT, {**ASK, "tool_choice": "required", "parallel_tool_calls": False})
        grammar = cluster.workers["prefill-0"].received.prefills[0].task.sampling.grammar
    assert json.loads(grammar.text)["maxItems"] == 1


async def test_a_forced_call_and_another_form_exclude_each_other(tmp_path: Path) -> None:
    form = {"response_format": {"type": "json_object"}}
    async with writing_cluster(tmp_path, "x", tool_parser="hermes") as cluster:
        status, answer = await cluster.post(CHAT, {**ASK, **form, "tool_choice": "required"})
        assert (status, answer["error"]["param"]) == (400, "tool_choice")


async def test_an_answer_of_another_form_is_content_though_it_looks_like_reasoning_or_a_call(
    tmp_path: Path,
) -> None:
    text = FORMATS["hermes"]
    form = {"guided_regex": ".*"}
    written = f"<think>{text}"
    async with writing_cluster(tmp_path, written, tool_parser="hermes", reasoning_parser="think") as cluster:
        _, answer = await cluster.post(CHAT, {**ASK, **form})
    message = answer["choices"][0]["message"]
    assert message["content"] == written and not message.get("tool_calls")


async def test_tags_that_are_special_tokens_are_seen(tmp_path: Path) -> None:
    """Llama's and Mistral's tags are special tokens; they are hidden like others if no parser needs them."""
    special = ("[TOOL_CALLS]", "[ARGS]", "[OTHER]")
    begin, args, other = range(first_special(), first_special() + 3)
    tokens = [other, *byte_ids(b"Ok. "), begin, *byte_ids(b"now"), args, *byte_ids(b"{}"), begin]
    async with writing_cluster(tmp_path, tokens, special=special, tool_parser="mistral") as cluster:
        _, answer = await cluster.post(CHAT, ASK)
        _, plain = await cluster.post(CHAT, {**ASK, "tools": []})
    message = answer["choices"][0]["message"]
    assert (message["content"], functions(message["tool_calls"])) == ("Ok. [TOOL_CALLS]", [("now", "{}")])
    assert plain["choices"][0]["message"]["content"] == "Ok. now{}"


async def test_logprobs_and_token_ids_are_those_of_all_tokens(tmp_path: Path) -> None:
    text = f'a <tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
    script = {"tokens_per_step": 9, "logprobs": {5: -0.5}}
    body = {**ASK, "logprobs": True, "return_token_ids": True}
    async with writing_cluster(tmp_path, text, script=script, tool_parser="hermes") as cluster:
        _, whole = await cluster.post(CHAT, body)
        found = choices(await cluster.stream(CHAT, body))
    (choice,) = whole["choices"]
    assert choice["token_ids"][:-1] == byte_ids(text.encode())
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    shown = [token for one in found for token in one.get("token_ids", ())]
    positions = [entry for one in found if one["logprobs"] for entry in one["logprobs"]["content"]]
    assert shown == choice["token_ids"]
    assert positions == choice["logprobs"]["content"]


@pytest.mark.parametrize("die_at", [1, 5, 30, 60, 90])
async def test_a_call_goes_on_when_its_worker_dies(die_at: int, tmp_path: Path) -> None:
    """Inside a tag, the name or the arguments: nothing is lost and nothing is repeated."""

    def script(task: pb.Task) -> dict[str, Any]:
        return {"die_at": die_at if task.attempt == 0 else None}

    async with writing_cluster(tmp_path, FORMATS["hermes"], script=script, tool_parser="hermes") as cluster:
        await cluster.add(Role.DECODE, "decode-1", max_model_len=LENGTH)
        streamed = joined(await cluster.stream(CHAT, ASK))
        assert (await cluster.metrics())['kvbaton_request_replays_total{kind="worker_lost"}'] == 1
    assert functions(streamed["calls"]) == [("get_weather", PARIS), ("now", "{}")]
    assert (streamed["content"], streamed["finish_reason"]) == ("", "tool_calls")


async def test_a_stop_string_ends_an_answer_with_a_call(tmp_path: Path) -> None:
    text = '<tool_call>{"name": "now"}</tool_call> then STOP and more'
    async with writing_cluster(tmp_path, text, tool_parser="hermes") as cluster:
        _, answer = await cluster.post(CHAT, {**ASK, "stop": "STOP"})
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("then ", "STOP")
    assert functions(choice["message"]["tool_calls"]) == [("now", "{}")]


async def test_an_answer_in_other_scripts_is_never_cut_inside_a_character(tmp_path: Path) -> None:
    arguments = json.dumps({"city": "京都 🎉"}, ensure_ascii=False)
    text = f'Grüße! <tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'
    async with writing_cluster(tmp_path, text, tool_parser="hermes") as cluster:
        streamed = joined(await cluster.stream(CHAT, {**ASK, "tools": [WEATHER, NOW]}))
    assert streamed["content"] == "Grüße!"
    assert functions(streamed["calls"]) == [("get_weather", arguments)]


@pytest.mark.parametrize("tags", ["", "<think>", "<t> <t>", "a b c"])
def test_reasoning_tags_that_cannot_be_told_apart_stop_the_router(tags: str) -> None:
    with pytest.raises(ValueError, match="two different tags"):
        RouterSettings(reasoning_tags=tags)
