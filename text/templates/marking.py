"""Puts marks around every text of a conversation that a template must show."""

from typing import Any

from text.chat import Message
from text.templates.arguments import as_object
from text.templates.marks import Marks

_DOCUMENT_TEXTS = ("text", "content", "contents", "document", "body", "passage")


def mark_messages(messages: list[Message], marks: Marks, *, is_continued: bool = False) -> list[Message]:
    """Return the messages with marks. is_continued: the last mark includes white space at the end."""
    marked = [_marked(message, f"messages[{index}]", marks) for index, message in enumerate(messages)]
    if is_continued:
        last = len(messages) - 1
        content = _marked_content(messages[last], f"messages[{last}].content", marks, ends_with_space=True)
        marked[last]["content"] = content
    return marked


def mark_documents(documents: list[dict[str, Any]], marks: Marks) -> list[dict[str, Any]]:
    """Return the documents with marks around their direct strings, of which their text is required."""
    return [
        {
            key: marks.wrap(value, f"documents[{index}].{key}", is_required=key in _DOCUMENT_TEXTS)
            if isinstance(value, str)
            else value
            for key, value in document.items()
        }
        for index, document in enumerate(documents)
    ]


def _marked(message: Message, where: str, marks: Marks) -> Message:
    marked = dict(message)
    if message.get("content"):
        marked["content"] = _marked_content(message, f"{where}.content", marks)
    if message.get("reasoning_content"):
        marked["reasoning_content"] = marks.wrap(
            message["reasoning_content"], f"{where}.reasoning_content", is_required=False
        )
    if message.get("tool_calls"):
        marked["tool_calls"] = [
            _marked_call(call, f"{where}.tool_calls[{index}].function", marks)
            for index, call in enumerate(message["tool_calls"])
        ]
    return marked


def _marked_content(message: Message, where: str, marks: Marks, *, ends_with_space: bool = False) -> Any:
    content = message["content"]
    is_answer = message["role"] == "assistant"
    if isinstance(content, str):
        return marks.wrap(content, where, is_answer=is_answer, ends_with_space=ends_with_space)
    last = len(content) - 1
    return [
        {
            **part,
            "text": marks.wrap(
                part["text"],
                f"{where}[{index}]",
                is_answer=is_answer,
                ends_with_space=ends_with_space and index == last,
            ),
        }
        for index, part in enumerate(content)
    ]


def _marked_call(call: dict[str, Any], where: str, marks: Marks) -> dict[str, Any]:
    function = call["function"]
    name = marks.wrap(function["name"], f"{where}.name")
    wrap = marks.wrap if as_object(function["arguments"]) is None else marks.wrap_json
    return {
        **call,
        "function": {
            **function,
            "name": name,
            "arguments": wrap(function["arguments"], f"{where}.arguments"),
        },
    }
