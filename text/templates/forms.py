"""Message forms: converts a conversation (``text.chat``) to the form that a template needs.

Templates need the arguments of calls as an object or as JSON, while a client sends any text.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from contract.json_schema import no_number
from text.chat import Message
from text.templates.turns import (
    content_text,
    merge_neighbours,
    merge_systems,
    merged,
    name_calls,
    one_call_each,
    system_into_user,
)

BROKEN_KEY = "arguments"
"""The key of arguments that are not an object, for templates that iterate over the keys of an object."""
_ID_LENGTH = 9
_EMPTY: dict[str, Any] = {"description": "", "parameters": {"type": "object", "properties": {}}}
Absent = Literal["null", "empty", "missing", "part"]
"""The representation of a content without text; "part" is a list of one part without text."""
ABSENT: tuple[Absent, ...] = ("null", "empty", "missing", "part")
_MAX_DEPTH = 64


@dataclass(frozen=True)
class Form:
    """The form in which one template shows complete conversations.

    Texts. parts: roles whose text is passed as a list of parts. keeps_parts: roles whose parts are passed unchanged; for
    other roles they are joined by newlines.

    System messages. system: their place. developer: the role of developer messages. apart: pairs of adjacent leading
    roles that stay separate messages. later: roles of system messages that may follow other messages.

    Calls. calls: as ``tool_calls``, or as JSON in the text. arguments: as an object or JSON text. broken: arguments
    that are not an object, as their text, or as the only value of an object. results: as tool messages or user
    messages. call_contents, bare_contents: allowed contents without text beside calls, and alone; the first replaces
    others. splits_calls: text and calls are two messages. one_call: a message has at most one call, followed by its
    result. call_ids: as sent, of nine characters, or with the function's name.

    merges: adjacent messages of one role are merged. reasoning: the key of earlier reasoning; None drops it. tools: as sent,
    the function only, as JSON under the key ``tools`` of the system message, or as JSON in its text. fills: keys that are
    added, empty, to functions without them.
    """

    parts: frozenset[str] = frozenset()
    keeps_parts: frozenset[str] = frozenset()
    system: Literal["system", "user"] = "system"
    developer: Literal["developer", "system"] = "system"
    apart: frozenset[tuple[str, ...]] = frozenset()
    later: frozenset[str] = frozenset()
    arguments: Literal["object", "text"] = "object"
    broken: Literal["text", "object"] = "text"
    calls: Literal["calls", "text"] = "calls"
    results: Literal["tool", "user"] = "tool"
    call_contents: tuple[Absent, ...] = ABSENT
    bare_contents: tuple[Absent, ...] = ABSENT
    splits_calls: bool = False
    one_call: bool = False
    call_ids: Literal["sent", "nine", "named"] = "sent"
    merges: bool = False
    reasoning: str | None = "reasoning_content"
    tools: Literal["sent", "function", "key", "system"] = "sent"
    fills: frozenset[str] = frozenset()


def shape(messages: list[Message], form: Form) -> list[Message]:
    """Return the messages for the template; the given ones are not changed."""
    shaped = [
        {**message, "role": form.developer} if message["role"] == "developer" else dict(message)
        for message in messages
    ]
    shaped = merge_systems(shaped, form.apart, form.later)
    if form.system == "user":
        shaped = system_into_user(shaped)
    if form.call_ids == "named":
        shaped = name_calls(shaped)
    if form.one_call:
        shaped = one_call_each(shaped)
    shaped = [part for message in shaped for part in _assistant(message, form)]
    shaped = _results(shaped, form)
    if form.merges:
        shaped = merge_neighbours(shaped)
    return [_with_content(message, form) for message in shaped]


def shape_tools(tools: list[dict[str, Any]], form: Form) -> list[dict[str, Any]] | None:
    """Return the tools for the template; None if it gets none."""
    if form.fills:
        missing = [
            {key: _EMPTY[key] for key in sorted(form.fills) if tool["function"].get(key) is None}
            for tool in tools
        ]
        tools = [
            {**tool, "function": {**tool["function"], **more}} if more else tool
            for tool, more in zip(tools, missing, strict=True)
        ]
    if form.tools in ("key", "system") or not tools:
        return None
    return [tool["function"] for tool in tools] if form.tools == "function" else tools


def _assistant(message: Message, form: Form) -> list[Message]:
    if message["role"] != "assistant":
        return [message]
    if "reasoning_content" in message and form.reasoning != "reasoning_content":
        name = form.reasoning
        renamed = {name if key == "reasoning_content" else key: value for key, value in message.items()}
        message = {key: value for key, value in renamed.items() if key is not None}
    if not message.get("tool_calls"):
        return [_with_absent(message, form.bare_contents)]
    if form.calls == "text":
        lines = [content_text(message.get("content"))] if message.get("content") else []
        for function in (call["function"] for call in message["tool_calls"]):
            name = json.dumps(function["name"], ensure_ascii=False)
            lines.append(f'{{"name": {name}, "arguments": {_as_json(function["arguments"])}}}')
        kept = {key: value for key, value in message.items() if key not in ("tool_calls", "content")}
        return [{**kept, "content": "\n".join(lines)}]
    message["tool_calls"] = [_call(call, form) for call in message["tool_calls"]]
    if not message.get("content"):
        return [_with_absent(message, form.call_contents)]
    if not form.splits_calls:
        return [message]
    # White space alone is no text: a message of its own would be an empty turn.
    if not content_text(message["content"]).strip():
        return [_set_absent(message, form.call_contents[0])]
    text_message = {key: value for key, value in message.items() if key != "tool_calls"}
    call_message = {key: value for key, value in message.items() if not key.startswith("reasoning")}
    return [text_message, _set_absent(call_message, form.call_contents[0])]


def _with_absent(message: Message, allowed: tuple[Absent, ...]) -> Message:
    if message.get("content"):
        return message
    sent: Absent = "missing"
    if "content" in message:
        sent = "null" if message["content"] is None else "empty"
    return message if sent in allowed else _set_absent(message, allowed[0])


def _set_absent(message: Message, absent: Absent) -> Message:
    if absent == "missing":
        return {key: value for key, value in message.items() if key != "content"}
    if absent == "part":
        return {**message, "content": [{"type": "text", "text": ""}]}
    return {**message, "content": None if absent == "null" else ""}


def _call(call: dict[str, Any], form: Form) -> dict[str, Any]:
    function = call["function"]
    shaped = {**call, "function": {**function, "arguments": _arguments(function["arguments"], form)}}
    if form.call_ids == "nine" and "id" in call:
        shaped["id"] = _short_id(call["id"])
    return shaped


def _arguments(text: str, form: Form) -> Any:
    value = as_object(text)
    if value is None:
        if form.broken == "text":
            return text
        return {BROKEN_KEY: text} if form.arguments == "object" else f'{{"{BROKEN_KEY}": {_as_json(text)}}}'
    if form.arguments == "object":
        return value
    return text if text.strip() else "{}"


def _short_id(call_id: Any) -> str:
    text = str(call_id)
    if len(text) == _ID_LENGTH and text.isascii() and text.isalnum():
        return text
    # The same id in the call and in its result, and in every later request.
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_LENGTH]


def _results(messages: list[Message], form: Form) -> list[Message]:
    if form.results == "tool":
        has_short = form.call_ids == "nine"
        return [
            {**message, "tool_call_id": _short_id(message["tool_call_id"])}
            if has_short and message["role"] == "tool" and "tool_call_id" in message
            else message
            for message in messages
        ]
    runs: list[list[Message]] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            message = {"role": "user", "content": f"Tool result:\n{content_text(message.get('content'))}"}
        is_user = message["role"] == "user"
        # Many templates require that users and answers take turns, so results and the next question are one message.
        if after_result and is_user:
            runs[-1].append(message)
        else:
            runs.append([message])
        after_result = is_result or (after_result and is_user)
    return [merged(run) for run in runs]


def _with_content(message: Message, form: Form) -> Message:
    content = message.get("content")
    role = message["role"]
    if isinstance(content, list) and role not in form.keeps_parts:
        content = content_text(content)
    if isinstance(content, str) and role in form.parts:
        content = [{"type": "text", "text": content}]
    return message if content is message.get("content") else {**message, "content": content}


def as_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in ``text``, or None for anything else.

    None also for an object that Python cannot represent (duplicate keys, NaN, half a surrogate pair, deep nesting).
    """
    if not text.strip():
        return {}
    # Counting is fast, and few arguments have that many brackets.
    if text.count("{") + text.count("[") > _MAX_DEPTH and _depth(text) > _MAX_DEPTH:
        return None
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=no_number)
        # Half of a surrogate pair is valid JSON, but no tokenizer accepts it.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _as_json(text: str) -> str:
    """Return ``text`` if it is a JSON object, else its JSON string; an empty text becomes an empty object."""
    if not text.strip():
        return "{}"
    return text if as_object(text) is not None else json.dumps(text, ensure_ascii=False)


def _depth(text: str) -> int:
    depth = deepest = 0
    is_string = is_escaped = False
    for character in text:
        if is_string:
            if character == '"' and not is_escaped:
                is_string = False
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            is_string = True
        elif character in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "}]":
            depth -= 1
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found
