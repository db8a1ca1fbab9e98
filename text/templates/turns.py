"""Changes turns for templates that restrict them: adjacent messages of one role, several calls at once, ids of calls."""

import re
from collections import deque
from collections.abc import Iterator
from itertools import pairwise

from text.chat import REASONING_NAMES, Message
from text.templates.systems import SEPARATOR, content_text

_MERGED = ("user", "assistant")
_NUMBERED = re.compile(r".*:(\d{1,9})", re.DOTALL)


def has_neighbours(messages: list[Message]) -> bool:
    """Return whether ``merge_neighbours`` would merge any."""
    return any(_are_one(first, second) for first, second in pairwise(messages))


def merge_neighbours(messages: list[Message]) -> list[Message]:
    """Return the messages with adjacent ones of one role merged: users, and assistants without calls."""
    runs: list[list[Message]] = []
    for message in messages:
        if runs and _are_one(runs[-1][-1], message):
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


def _are_one(first: Message, second: Message) -> bool:
    is_calling = first.get("tool_calls") or second.get("tool_calls")
    return first["role"] == second["role"] and first["role"] in _MERGED and not is_calling


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
