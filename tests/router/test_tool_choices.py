"""Every form of ``tool_choice`` on each API: what the prompt lists, what is forced, and which calls are returned."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.router.cluster import Cluster
from tests.router.test_messages import PATH as MESSAGES
from tests.router.test_messages import SAY
from tests.router.test_responses import PATH as RESPONSES
from tests.router.tool_cluster import CHAT, prompt_of, writing_cluster

Json = dict[str, Any]
NAMES = ("look", "patch", "run")
SCHEMA: Json = {"type": "object", "properties": {}}
HOSTED = "web_search"
WRITTEN = "".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in NAMES)


def flat(name: str) -> Json:
    return {"type": "custom" if name == "patch" else "function", "name": name}


def nested(name: str) -> Json:
    kind = flat(name)["type"]
    return {"type": kind, kind: {"name": name}}


def tools_of(path: str) -> list[Json]:
    hosted = {"type": HOSTED, "name": HOSTED}
    if path == MESSAGES:
        return [*({"name": name, "input_schema": SCHEMA} for name in NAMES), hosted]
    return [*(flat(name) if path == RESPONSES else nested(name) for name in NAMES), hosted]


def body_of(path: str, choice: Any) -> Json:
    body: Json = {"input": "hi"} if path == RESPONSES else {"messages": SAY["messages"], "max_tokens": 900}
    return {**body, "tools": tools_of(path), **({} if choice is None else {"tool_choice": choice})}


def allowed(mode: str, *names: str) -> dict[str, Json]:
    """Return the choice on each API; a hosted tool among the allowed ones is left out."""
    found = {"mode": mode, "tools": [{"type": HOSTED}, *map(flat, names)]}
    inner = {"mode": mode, "tools": [{"type": HOSTED}, *map(nested, names)]}
    return {
        RESPONSES: {"type": "allowed_tools", **found},
        CHAT: {"type": "allowed_tools", "allowed_tools": inner},
    }


def alike(chat: Any, message: Any, response: Any = None) -> dict[str, Any]:
    return {CHAT: chat, RESPONSES: chat if response is None else response, MESSAGES: message}


CHOICES: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...] | None]] = {
    "none given": (alike(None, None), NAMES, None),
    "auto": (alike("auto", {"type": "auto"}), NAMES, None),
    "none": (alike("none", {"type": "none"}), (), None),
    "required": (alike("required", {"type": "any"}), NAMES, NAMES),
    "one": (alike(nested("run"), {"type": "tool", "name": "run"}, flat("run")), ("run",), ("run",)),
    "custom": (
        alike(nested("patch"), {"type": "tool", "name": "patch"}, flat("patch")),
        ("patch",),
        ("patch",),
    ),
    "allowed, auto": (allowed("auto", "run", "patch"), ("patch", "run"), None),
    "allowed, auto, none": (allowed("auto"), (), None),
    "allowed, required": (allowed("required", "look", "patch"), ("look", "patch"), ("look", "patch")),
}
"""Name → the choice on each API, the functions that may be called, and those of a forced answer (None: not forced)."""


def calls_of(answer: Json) -> tuple[str, ...]:
    if "choices" in answer:
        calls = answer["choices"][0]["message"].get("tool_calls") or []
        return tuple(call[call["type"]]["name"] for call in calls)
    items = answer.get("output") or answer.get("content") or []
    return tuple(item["name"] for item in items if "name" in item)


async def asked(cluster: Cluster, path: str, choice: Any) -> tuple[Json, Any]:
    """Return the answer, and the schema of the grammar that the workers got."""
    status, answer = await cluster.post(path, body_of(path, choice))
    assert status == 200, answer
    sampling = cluster.workers["prefill-0"].received.prefills[-1].task.sampling
    return answer, json.loads(sampling.grammar.text) if sampling.HasField("grammar") else None


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_tool_choice_means_the_same_on_each_api(tmp_path: Path, path: str) -> None:
    """C1: ``allowed_tools`` was refused; types that cannot run here do not refuse a choice that names others too."""
    async with writing_cluster(tmp_path, WRITTEN, tool_parser="hermes") as cluster:
        for name, (choices, callable_names, forced) in CHOICES.items():
            if path not in choices:
                continue
            answer, schema = await asked(cluster, path, choices[path])
            assert prompt_of(cluster).startswith("tools: look patch run;") is (name != "none"), name
            if forced is None:
                assert (calls_of(answer), schema) == (callable_names, None), name
            elif len(forced) > 1:
                assert set(schema["$defs"]) == set(forced), name
            else:
                assert schema["type"] == "object" and "$defs" not in schema, name


WRONG: dict[str, list[tuple[Any, str]]] = {
    RESPONSES: [
        ({"type": "allowed_tools", "tools": []}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "any", "tools": []}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice"),
        (allowed("required")[RESPONSES], "tool_choice"),
        (allowed("auto", "other")[RESPONSES], "tool_choice.tools[1]"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [7]}, "tool_choice.tools[0]"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}, "tool_choice.tools[0]"),
        ({"type": HOSTED}, "tool_choice.type"),
    ],
    CHAT: [
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.allowed_tools"),
        (allowed("required")[CHAT], "tool_choice"),
        (allowed("auto", "other")[CHAT], "tool_choice.allowed_tools.tools[1]"),
        ({"type": HOSTED}, "tool_choice.type"),
    ],
    MESSAGES: [
        ({"type": "tool", "name": HOSTED}, "tool_choice.name"),
        ({"type": "allowed_tools"}, "tool_choice.type"),
    ],
}


@pytest.mark.parametrize("path", WRONG)
async def test_a_wrong_choice_is_refused_by_its_place(tmp_path: Path, path: str) -> None:
    async with writing_cluster(tmp_path, "ok", tool_parser="hermes") as cluster:
        for choice, param in WRONG[path]:
            status, answer = await cluster.post(path, body_of(path, choice))
            assert status == 400, choice
            error = answer["error"]
            assert param in (error.get("param"), error["message"].partition(" ")[0]), answer


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "parallel_tool_calls"), (RESPONSES, "parallel_tool_calls"), (MESSAGES, "")]
)
async def test_one_call_of_those_that_are_allowed(tmp_path: Path, path: str, field: str) -> None:
    """The first call is of a function that is not allowed: the one that is kept is the first of the others."""
    body = body_of(path, allowed("auto", "run", "patch").get(path))
    if path == MESSAGES:
        body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    else:
        body[field] = False
    async with writing_cluster(tmp_path, WRITTEN, tool_parser="hermes") as cluster:
        _, answer = await cluster.post(path, body)
    assert calls_of(answer) == (("look",) if path == MESSAGES else ("patch",))


async def test_allowed_tools_of_a_namespace(tmp_path: Path) -> None:
    space = {"type": "namespace", "name": "files", "tools": [flat("run"), flat("look")]}
    body = {"input": "hi", "tools": [space, flat("run")]}
    calls = {
        "all of it": ([{"type": "namespace", "name": "files"}], ["files__look", "files__run"]),
        "one of it": ([{**flat("run"), "namespace": "files"}], ["files__run"]),
        "none of it": ([flat("run")], ["run"]),
    }
    async with writing_cluster(tmp_path, "ok", tool_parser="hermes") as cluster:
        for tools, names in calls.values():
            choice = {"type": "allowed_tools", "mode": "required", "tools": tools}
            status, answer = await cluster.post(RESPONSES, {**body, "tool_choice": choice})
            assert status == 200, answer
            task = cluster.workers["prefill-0"].received.prefills[-1].task
            assert sorted(json.loads(task.sampling.grammar.text)["$defs"]) == names
