"""Changes turns for templates that restrict them: system messages, adjacent messages of one role, several calls, call ids.

Leading system and developer messages are merged, later ones marked. A later message stays at its place, so that the prompt
of a conversation is the beginning of the prompt of its next turn: a text that moved to the top would let every turn compute
everything anew.
"""

import re
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from text.chat import REASONING_NAMES, SYSTEM_ROLES, Message

SEPARATOR = "\n\n"
"""Separates the texts of merged messages."""
_BEGIN = "<system-reminder>\n"
_END = "\n</system-reminder>"
_MERGED = ("user", "assistant")
_NUMBERED = re.compile(r".*:(\d{1,9})", re.DOTALL)


def content_text(content: Any) -> str:
    """Return the text of a content; parts are joined by newlines."""
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content)
    return content or ""


def merge_systems(
    messages: list[Message], apart: frozenset[tuple[str, ...]], later: frozenset[str]
) -> list[Message]:
    """Return the messages with their leading system messages merged, unless ``apart`` has their roles (each pair).

    Later ones whose role is not in ``later`` become marked texts of a turn of the user, at their places.
    """
    num_leading = next(
        (index for index, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES),
        len(messages),
    )
    leading = messages[:num_leading]
    roles = [message["role"] for message in leading]
    if leading and not all(pair in apart for pair in pairwise(roles)):
        leading = [_merged(leading)]
    return leading + _marked(messages[num_leading:], later)


def _marked(messages: list[Message], later: frozenset[str]) -> list[Message]:
    """Return the messages with each system message whose role is not in ``later`` within another one, marked.

    It follows the text of the question or of the tool's result before it: a message of its own would be a new question,
    before which many templates drop the model's reasoning. Behind an answer it precedes the next question.
    """
    found: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        role = message["role"]
        if role in SYSTEM_ROLES and role not in later:
            text = f"{_BEGIN}{content_text(message['content'])}{_END}"
            # Texts that wait came earlier, and must stay before this one.
            if found and found[-1]["role"] in ("user", "tool") and not waiting:
                found[-1] = _with_text(found[-1], after=text)
            else:
                waiting.append(text)
            continue
        if waiting and role == "user":
            message = _with_text(message, before=SEPARATOR.join(waiting))
            waiting = []
        elif waiting:
            found.append({"role": "user", "content": SEPARATOR.join(waiting)})
            waiting = []
        found.append(message)
    if waiting:
        found.append({"role": "user", "content": SEPARATOR.join(waiting)})
    return found


def _with_text(message: Message, *, before: str = "", after: str = "") -> Message:
    content = message.get("content")
    if isinstance(content, list):
        parts = [{"type": "text", "text": text} for text in (before, after)]
        return {**message, "content": [part for part in [parts[0], *content, parts[1]] if part["text"]]}
    return {**message, "content": SEPARATOR.join(text for text in (before, content, after) if text)}


def system_into_user(messages: list[Message]) -> list[Message]:
    """Return the messages with the leading system message at the beginning of the first user message."""
    if not messages or messages[0]["role"] not in SYSTEM_ROLES:
        return messages
    first, *rest = messages
    for index, message in enumerate(rest):
        if message["role"] == "user":
            rest[index] = {**message, "content": _joined([first, message])}
            return rest
    return messages


def add_to_system(messages: list[Message], text: str = "", **fields: Any) -> list[Message]:
    """Return the messages with ``text`` and ``fields`` in the leading system message, which is added if there is none."""
    addition: Message = {"role": "system", "content": text, **fields}
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        first = _merged([messages[0], addition]) if text else messages[0]
        return [{**first, **fields}, *messages[1:]]
    return [addition, *messages]


def _merged(messages: list[Message]) -> Message:
    return messages[0] if len(messages) == 1 else {**messages[0], "content": _joined(messages)}


def _joined(messages: list[Message]) -> str:
    return SEPARATOR.join(text for message in messages if (text := content_text(message["content"])))


def merge_neighbours(messages: list[Message]) -> list[Message]:
    """Return the messages with adjacent ones of one role merged: users, and assistants without calls."""
    runs: list[list[Message]] = []
    for message in messages:
        last = runs[-1][-1] if runs else {}
        is_calling = last.get("tool_calls") or message.get("tool_calls")
        if last.get("role") == message["role"] and message["role"] in _MERGED and not is_calling:
            runs[-1].append(message)
        else:
            runs.append([message])
    return [merged(run) for run in runs]


def merged(run: list[Message]) -> Message:
    """Return the messages as one, with their texts separated by empty lines."""
    if len(run) == 1:
        return run[0]
    one = dict(run[0])
    for key in ("content", *REASONING_NAMES):
        if texts := [text for message in run if (text := content_text(message.get(key)))]:
            one[key] = SEPARATOR.join(texts)
    return one


def one_call_each(messages: list[Message]) -> list[Message]:
    """Return the messages with simultaneous calls split: each call is a message, followed by its result."""
    parted: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            parted.append(message)
            continue
        end = index
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        parted += _parted(message, calls, messages[index:end])
        index = end
    return parted


def _parted(message: Message, calls: list[Message], results: list[Message]) -> Iterator[Message]:
    """Yield each call with its results: those with its id, else the next one that belongs to no other call."""
    ids = {str(call["id"]) for call in calls if call.get("id") is not None}
    own: dict[str, list[Message]] = {}
    others: deque[Message] = deque()
    for result in results:
        call_id = result.get("tool_call_id")
        if call_id in ids:
            own.setdefault(call_id, []).append(result)
        else:
            others.append(result)
    bare = {key: value for key, value in message.items() if key not in (*REASONING_NAMES, "content")}
    for number, call in enumerate(calls):
        head = message if number == 0 else {**bare, "content": None}
        yield {**head, "tool_calls": [call]}
        if found := own.pop(str(call.get("id")), []):
            yield from found
        elif others:
            yield others.popleft()
    yield from others


def name_calls(messages: list[Message]) -> list[Message]:
    """Return the messages with call ids that contain the function: ``functions.NAME:NUMBER``, also in results.

    The number is the one at the end of the id, if it has such a number, else that of the call in the conversation.
    """
    ids: dict[str, str] = {}
    named: list[Message] = []
    number = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            sent = str(call.get("id"))
            match = _NUMBERED.fullmatch(sent)
            ids[sent] = f"functions.{call['function']['name']}:{match[1] if match else number}"
            calls.append({**call, "id": ids[sent]})
            number += 1
        if calls:
            message = {**message, "tool_calls": calls}
        elif message.get("tool_call_id") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
        named.append(message)
    return named
