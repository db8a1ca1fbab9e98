"""One seeded request for each feature of the API; requested whole or streamed, with answers in a comparable form."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from tests.service import Service

Json = dict[str, Any]
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
_DRAWN: Json = {"temperature": 1.4, "top_p": 0.95, "return_token_ids": True}
_NO_END = {"1": -100}
_TEXT: Json = {**_DRAWN, "prompt": "The old moose sat near", "logit_bias": _NO_END, "max_tokens": 110}
_TALK: Json = {**_DRAWN, "messages": [{"role": "user", "content": "lamp: fox\ncomet: ginger"}]}
_LONG = {"type": "string", "minLength": 60, "maxLength": 72, "pattern": "^[a-z ]*$"}
_OBJECT: Json = {"type": "object", "properties": {"text": _LONG}, "required": ["text"]}
_OBJECT["additionalProperties"] = False
_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": _OBJECT}} for name in ("write", "erase")
]

CELLS: dict[str, tuple[str, Json]] = {
    "n": (COMPLETION, {**_TEXT, "n": 3, "seed": 1}),
    "best_of": (COMPLETION, {**_TEXT, "n": 2, "best_of": 4, "seed": 2}),
    "json_schema": (
        CHAT,
        {
            **_TALK,
            "seed": 3,
            "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": _OBJECT}},
        },
    ),
    "regex": (
        COMPLETION,
        {**_TEXT, "seed": 4, "logit_bias": {}, "guided_regex": "([a-z]{2,9} ){12}[0-9]{4}"},
    ),
    "required": (CHAT, {**_TALK, "seed": 5, "tools": _TOOLS, "tool_choice": "required"}),
    "named": (
        CHAT,
        {
            **_TALK,
            "seed": 6,
            "tools": _TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "erase"}},
        },
    ),
    "penalties": (
        COMPLETION,
        {
            **_TEXT,
            "seed": 7,
            "presence_penalty": 0.7,
            "frequency_penalty": 0.4,
            "repetition_penalty": 1.2,
        },
    ),
    "logprobs": (COMPLETION, {**_TEXT, "seed": 8, "logprobs": 3}),
    "echo": (COMPLETION, {**_TEXT, "seed": 13, "echo": True, "logprobs": 2, "n": 2}),
    "chat_logprobs": (
        CHAT,
        {**_TALK, "seed": 9, "logprobs": True, "top_logprobs": 2, "logit_bias": _NO_END, "max_tokens": 110},
    ),
    "stop": (COMPLETION, {**_TEXT, "seed": 10, "stop": ["qq", "e ", ".", "k\n"], "min_tokens": 70}),
    "logit_bias": (COMPLETION, {**_TEXT, "seed": 11, "logit_bias": {**_NO_END, "264": 4.0, "69": -100}}),
    "min_tokens": (COMPLETION, {**_TEXT, "seed": 12, "logit_bias": {}, "min_tokens": 80}),
}
STREAMED = {name: cell for name, cell in CELLS.items() if name != "best_of"}
"""``best_of`` above ``n`` cannot stream."""


async def ask_whole(service: Service) -> dict[str, Json]:
    """Send every cell at the same time; return whole responses without what differs between requests."""
    answers = await asyncio.gather(*(service.post(path, body) for path, body in CELLS.values()))
    assert {status for status, _ in answers} == {200}, answers
    return {name: comparable(answer) for name, (_, answer) in zip(CELLS, answers, strict=True)}


async def ask_embeddings(service: Service) -> Json:
    """Return embeddings of a few prompts, one longer than a step, with ``usage``."""
    prompts = ["lamp: fox", "The old moose sat near the lake.", "comet: ginger\n" * 40]
    body = {"model": "kvbaton-demo", "input": prompts}
    status, answer = await service.post("/v1/embeddings", body)
    assert status == 200, answer
    return {"embeddings": answer["data"], "usage": answer["usage"]}


async def ask_streamed(service: Service, on_event: Callable[[str], None] = lambda _: None) -> dict[str, Json]:
    """Send every cell that can stream at the same time; ``on_event`` is called with the cell's name for each event."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(name: str, path: str, body: Json) -> Json:
            streamed_body = {**body, "stream": True, "stream_options": {"include_usage": True}}
            events = []
            async with session.post(f"http://{service.http}{path}", json=streamed_body) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if line.strip():
                        events.append(line.decode().removeprefix("data: ").strip())
                        on_event(name)
            assert events.pop() == "[DONE]", events
            return stream_choices([json.loads(event) for event in events])

        answers = await asyncio.gather(*(ask(name, *cell) for name, cell in STREAMED.items()))
    return dict(zip(STREAMED, answers, strict=True))


def comparable(response: Json) -> Json:
    """Return a response without id, time, names of calls and cached tokens."""
    usage = {name: count for name, count in response["usage"].items() if name.endswith("_tokens")}
    choices = [dict(choice) for choice in response["choices"]]
    for choice in choices:
        if "message" in choice:
            choice["message"] = {**choice["message"], "tool_calls": _calls(choice["message"])}
    kept = {name: value for name, value in response.items() if name not in ("id", "created", "kvbaton")}
    return {**kept, "choices": choices, "usage": usage}


def _calls(message: Mapping[str, Any]) -> list[Json]:
    return [call["function"] for call in message.get("tool_calls", [])]


def stream_choices(chunks: list[Json]) -> Json:
    """Return what a stream shows of its choices, in the form of ``whole_choices``."""
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            empty: Json = {"text": "", "calls": [], "token_ids": [], "logprobs": {}, "end": None}
            _add(choices.setdefault(piece["index"], empty), piece)
    return {"choices": [choices[index] for index in sorted(choices)], "usage": _counts(chunks[-1])}


def _add(choice: Json, piece: Json) -> None:
    delta = piece.get("delta", {})
    choice["text"] += piece.get("text", delta.get("content") or "")
    for call in delta.get("tool_calls", []):
        if "name" in call["function"]:
            choice["calls"].append({"name": call["function"]["name"], "arguments": ""})
        choice["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    choice["token_ids"] += piece.get("token_ids", [])
    for name, entries in (piece["logprobs"] or {}).items():
        if entries is not None:
            choice["logprobs"].setdefault(name, []).extend(entries)
    if piece["finish_reason"]:
        choice["end"] = (piece["finish_reason"], piece["stop_reason"])


def whole_choices(response: Json) -> Json:
    """Return what a whole response shows of its choices."""
    choices = [
        {
            "text": choice["text"] if "text" in choice else choice["message"]["content"] or "",
            "calls": choice["message"]["tool_calls"] if "message" in choice else [],
            "token_ids": choice["token_ids"],
            "logprobs": {name: e for name, e in (choice["logprobs"] or {}).items() if e is not None},
            "end": (choice["finish_reason"], choice["stop_reason"]),
        }
        for choice in response["choices"]
    ]
    return {"choices": choices, "usage": _counts(response)}


def _counts(response: Json) -> Json:
    return {name: count for name, count in response["usage"].items() if name.endswith("_tokens")}


def masked(value: Any, fractions: list[float]) -> str:
    """Return JSON with every fraction (a log probability) moved to ``fractions``: its last bits depend on the batch."""

    def without(value: Any) -> Any:
        if isinstance(value, float):
            fractions.append(value)
            return "a fraction"
        if isinstance(value, dict):
            return {name: without(inner) for name, inner in value.items()}
        return [without(inner) for inner in value] if isinstance(value, list | tuple) else value

    return json.dumps(without(value))
