"""Texts for the scripted model to answer, and what clients must receive: the router's own parsers over the whole text."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.router.tool_cluster import joined
from tests.scripted_checkpoint import scripted_tokenizer
from tests.text.parsing import test_hermes, test_llama3, test_mistral, test_qwen, test_reasoning
from tests.text.parsing.cutting import collected
from text.chat import Chat
from text.model_card import ModelCard
from text.stop import StopStrings

Json = dict[str, Any]
CHAT = "/v1/chat/completions"
PARIS, NOW = '{"city": "Paris 🎉"}', "{}"
TOOLS = test_qwen.TOOLS
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen": f"{test_qwen.call('get_weather', ('city', 'Paris 🎉'))}\n{test_qwen.call('now')}",
    "llama3": f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}',
    "mistral": f'[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS][{{"name": "now", "arguments": {{}}}}]',
}
"""Two parallel calls in each family's format."""
CHARACTERS = "🎉é👩‍👧 y̆ नि 世"
STOPS = ("🎉", "👧 y", "e\u0301", "again, ÿ", "世 STOP h", "again")
_LONG = "Say that 世界 again, ÿ̈ and 👩‍👩‍👧‍👦: "
_CORPORA = {"hermes": test_hermes, "qwen": test_qwen, "llama3": test_llama3, "mistral": test_mistral}


@dataclass(frozen=True)
class Cell:
    """A text for the model to answer. fields: of the request, in addition to those that all have."""

    text: str
    fields: Json = field(default_factory=dict)

    @property
    def num_choices(self) -> int:
        """The number of equal answers."""
        return int(self.fields.get("n", 1))

    def body(self) -> Json:
        """Return the request's JSON body."""
        messages = [{"role": "user", "content": self.text}]
        return {"messages": messages, "tools": TOOLS, "max_tokens": 800, "seed": 1, **self.fields}


@dataclass(frozen=True)
class Seen:
    """One answer as a client sees it. calls: (name, text of the arguments)."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    finish_reason: str
    stop_reason: str | None


def tools_and_reasoning_of(family: str) -> dict[str, Cell]:
    """Return the cells of one family, by name."""
    calls, thought = CALLS[family], "<think>\nHm, 世界…\n</think>\n\n"
    text_and_calls = f"Let me see. {calls}"
    return {
        "text": Cell("Just text.\n"),
        "calls": Cell(calls),
        "text and calls": Cell(text_and_calls),
        "two answers": Cell(text_and_calls, {"n": 2}),
        "one call alone": Cell(calls, {"parallel_tool_calls": False}),
        "reasoning": Cell(f"{thought}Ünd 🎉."),
        "reasoning and calls": Cell(thought + calls),
        "a stop string in a call": Cell(calls, {"stop": ["Paris"]}),
        "a stop string in a thought": Cell(thought + calls, {"stop": ["界"]}),
    }


def characters_and_stops() -> dict[str, Cell]:
    """Return characters of several tokens, alone and in stop strings; the first token is a part of one."""
    cells = {
        "characters": Cell(CHARACTERS),
        "a stop string that never comes": Cell("Let it STOP, hello", {"stop": ["STOPS", "hello world"]}),
    }
    text = f"{CHARACTERS} STOP hello again, ÿ. e\u0301"
    for kept in (False, True):
        for stop in STOPS:
            fields = {"stop": [stop, "qq"], "include_stop_str_in_output": kept}
            cells[f"stop at {stop}, kept {kept}"] = Cell(text, fields)
    for length in range(1, len(scripted_tokenizer().encode(CHARACTERS).ids)):
        cells[f"cut after {length} tokens"] = Cell(CHARACTERS, {"max_tokens": length})
    return cells


def corpus_of(family: str) -> dict[str, Cell]:
    """Return the test cases of the family's parser and of the reasoning parser."""
    module: Any = _CORPORA[family]
    whole = [text for text, *_ in [*module.WHOLE.values(), *module.BROKEN.values()]]
    thoughts = [text for text, *_ in test_reasoning.ANSWERS]
    return {repr(text): Cell(text) for text in [*whole, *module.NO_CALLS, *thoughts]}


def long_cells_of(family: str) -> dict[str, Cell]:
    """Return answers that take long enough for a worker to be killed in the middle of all of them."""
    reasoned = f"<think>{_LONG * 3}</think>{_LONG * 2}{CALLS[family]}"
    return {
        "text and calls": Cell(_LONG * 6 + CALLS[family]),
        "reasoning and calls": Cell(reasoned),
        "two answers": Cell(reasoned, {"n": 2}),
        "a stop string": Cell(f"{_LONG * 6} then 🎉", {"stop": [" then 🎉"]}),
        "characters": Cell(CHARACTERS * 12),
    }


def expected(cells: dict[str, Cell], folder: Path) -> dict[str, list[Seen]]:
    """Return what clients must see of each cell, computed from the model card alone."""
    card = ModelCard.from_folder(folder)
    return {name: _expected(cell, card) for name, cell in cells.items()}


def _expected(cell: Cell, card: ModelCard) -> list[Seen]:
    ids = card.tokenizer.encode(cell.text)
    limit = cell.fields.get("max_tokens", len(ids))
    stops = StopStrings(
        cell.fields.get("stop", []), is_kept=bool(cell.fields.get("include_stop_str_in_output"))
    )
    text = stops.push(card.tokenizer.decode(ids[:limit], skip_special_tokens=False)) + stops.flush()
    chat = Chat(
        messages=[{"role": "user", "content": cell.text}],
        tools=tuple(TOOLS),
        parallel_tool_calls=cell.fields.get("parallel_tool_calls", True),
    )
    parser = card.answer_format.parser(chat, "")
    parsed = collected([*parser.push(text), *parser.flush()])
    reason = "length" if limit < len(ids) else "tool_calls" if parsed.calls else "stop"
    seen = Seen(parsed.content, parsed.reasoning, parsed.calls, reason, stops.matched)
    return [seen] * cell.num_choices


async def ask_whole(http: str, cells: dict[str, Cell]) -> dict[str, list[Seen]]:
    """Send all cells at the same time; return whole responses."""

    async def ask(session: aiohttp.ClientSession, cell: Cell) -> list[Seen]:
        async with session.post(f"http://{http}{CHAT}", json=cell.body()) as response:
            answer = await response.json()
            assert response.status == 200, answer
        return [_seen(choice["message"], choice) for choice in answer["choices"]]

    return await _ask_all(cells, ask)


async def ask_streamed(
    http: str, cells: dict[str, Cell], on_event: Callable[[str], None] = lambda _: None
) -> dict[str, list[Seen]]:
    """Send all cells at the same time as streams; ``on_event`` is called with the cell's name for each event."""
    names = {id(cell): name for name, cell in cells.items()}

    async def ask(session: aiohttp.ClientSession, cell: Cell) -> list[Seen]:
        chunks = []
        body = {**cell.body(), "stream": True}
        async with session.post(f"http://{http}{CHAT}", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.strip():
                    chunks.append(line.decode().removeprefix("data: ").strip())
                    on_event(names[id(cell)])
        assert chunks.pop() == "[DONE]"
        return list(_choices([json.loads(chunk) for chunk in chunks], cell))

    return await _ask_all(cells, ask)


def _choices(chunks: list[Json], cell: Cell) -> Iterator[Seen]:
    for index in range(cell.num_choices):
        own = [[c for c in chunk["choices"] if c["index"] == index] for chunk in chunks]
        message = joined([*({"choices": choices} for choices in own), "[DONE]"])
        yield _seen({**message, "tool_calls": message["calls"]}, [c for choices in own for c in choices][-1])


def _seen(message: Json, choice: Json) -> Seen:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return Seen(
        content=message.get("content") or "",
        reasoning=message.get("reasoning_content") or "",
        calls=[(call["name"], call["arguments"]) for call in calls],
        finish_reason=choice["finish_reason"],
        stop_reason=choice["stop_reason"],
    )


async def _ask_all(cells: dict[str, Cell], ask: Callable[..., Any]) -> dict[str, list[Seen]]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        answers = await asyncio.gather(*(ask(session, cell) for cell in cells.values()))
    return dict(zip(cells, answers, strict=True))


async def sent_back(http: str, cell: Cell) -> list[int]:
    """Send a cell's answer back on each path, with results for its calls; return the statuses of the responses."""
    async with aiohttp.ClientSession(f"http://{http}") as session:

        async def posted(path: str, body: Json) -> tuple[int, Json]:
            async with session.post(path, json=body) as response:
                return response.status, await response.json()

        user = [{"role": "user", "content": cell.text}]
        limits = {"max_tokens": cell.fields.get("max_tokens", 800)}
        _, chat = await posted(CHAT, cell.body())
        message = chat["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "4"}
            for call in message.get("tool_calls", ())
        ]
        first = await posted(CHAT, {**cell.body(), "messages": [*user, message, *results, *user]})
        flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
        request = {"tools": flat, "max_output_tokens": limits["max_tokens"]}
        _, response = await posted("/v1/responses", {**request, "input": user})
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "4"}
            for item in response["output"]
            if item["type"] == "function_call"
        ]
        second = await posted(
            "/v1/responses", {**request, "input": [*user, *response["output"], *outputs, *user]}
        )
        _, answer = await posted("/v1/messages", {**limits, "messages": user})
        turn = {"role": "assistant", "content": answer["content"]}
        third = await posted("/v1/messages", {**limits, "messages": [*user, turn, *user]})
        return [first[0], second[0], third[0]]
