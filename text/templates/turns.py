"""Turns in the order and number that templates take: neighbours of one role, several calls at once, ids of calls."""

import re
from itertools import pairwise

from text.chat import REASONING_NAMES, Message
from text.templates.systems import SEPARATOR, content_text

_MERGED = ("user", "assistant")
_NUMBERED = re.compile(r".*:(\d{1,9})", re.DOTALL)


def has_neighbours(messages: list[Message]) -> bool:
    """Return whether ``merge_neighbours`` would merge any."""
    return any(_are_one(first, second) for first, second in pairwise(messages))


def merge_neighbours(messages: list[Message]) -> list[Message]:
    """Return the messages with neighbours of one role merged: users, and assistants without calls."""
    merged: list[Message] = []
    for message in messages:
        if merged and _are_one(merged[-1], message):
            merged[-1] = _joined(merged[-1], message)
        else:
            merged.append(message)
    return merged


def _are_one(first: Message, second: Message) -> bool:
    is_calling = first.get("tool_calls") or second.get("tool_calls")
    return first["role"] == second["role"] and first["role"] in _MERGED and not is_calling


def _joined(first: Message, second: Message) -> Message:
    joined = {**second, **first}
    for key in ("content", *REASONING_NAMES):
        texts = [text for message in (first, second) if (text := content_text(message.get(key)))]
        if texts:
            joined[key] = SEPARATOR.join(texts)
    return joined


def one_call_each(messages: list[Message]) -> list[Message]:
    """Return the messages with several calls at once parted: each call in a message that its result follows."""
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
        results = messages[index:end]
        index = end
        bare = {key: value for key, value in message.items() if key not in (*REASONING_NAMES, "content")}
        for number, call in enumerate(calls):
            head = message if number == 0 else {**bare, "content": None}
            own = results if number == len(calls) - 1 else _results_of(call, results)
            results = [result for result in results if not any(result is one for one in own)]
            parted += [{**head, "tool_calls": [call]}, *own]
    return parted


def _results_of(call: Message, results: list[Message]) -> list[Message]:
    """Return the results of a call: those with its id, else the first one."""
    call_id = call.get("id")
    own = [result for result in results if call_id is not None and result.get("tool_call_id") == call_id]
    return own or results[:1]


def name_calls(messages: list[Message]) -> list[Message]:
    """Return the messages with ids of calls that tell the function: ``functions.NAME:NUMBER``, in the results too.

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
