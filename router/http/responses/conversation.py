"""The ``input`` of /v1/responses: items become the messages of a chat template."""

from typing import Any

from contract.errors import InvalidRequestError, UnsupportedFieldError
from router.http.bodies.body import Body
from router.http.fields.chat import template_kwargs
from router.limits import MAX_MESSAGES
from text.chat import Chat, Message
from text.tools import check_call_name, parse_arguments, parse_tool_choice, parse_tools

ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Type of a message's part → the field that holds its text."""


def response_chat(body: Body) -> Chat:
    """Read the conversation: ``instructions`` as a system message, then ``input``.

    Raises InvalidRequestError that names the wrong item, UnsupportedFieldError.
    """
    tools = parse_tools(body.get("tools"), is_flat=True)
    choice = parse_tool_choice(body.get("tool_choice"), tools, is_flat=True)
    instructions = body.string("instructions")
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    return Chat(
        messages=messages + _messages(body.get("input")),
        tools=() if choice.mode == "none" else tools,
        tool_choice=choice,
        parallel_tool_calls=body.flag("parallel_tool_calls", default=True),
        template_kwargs=template_kwargs(
            body,
            effort=body.object("reasoning").get("effort"),
            verbosity=body.object("text").get("verbosity"),
            prefix=("reasoning.", "text."),
        ),
    )


def _messages(raw: Any) -> list[Message]:
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    if not isinstance(raw, list) or not raw:
        raise InvalidRequestError("input must be a string, or a list with at least one item", param="input")
    if len(raw) > MAX_MESSAGES:
        raise InvalidRequestError(f"input has {len(raw)} items; the limit is {MAX_MESSAGES}", param="input")
    conversation = _Conversation()
    for index, item in enumerate(raw):
        conversation.add(item, f"input[{index}]")
    return conversation.messages()


class _Conversation:
    """Owns the messages so far. Consecutive reasoning, text and calls of the model become one message."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._after_calls: dict[int, list[str]] = {}
        """Texts that follow the calls of a message, by its index."""

    def messages(self) -> list[Message]:
        """Return all messages. Raises InvalidRequestError if there is none."""
        if not self._messages:
            raise InvalidRequestError(
                "input has no message, no call and no readable reasoning", param="input"
            )
        for index, texts in self._after_calls.items():
            message = self._messages[index]
            message["content"] = "".join([message["content"] or "", *texts])
        return [{**message, "content": message.get("content")} for message in self._messages]

    def add(self, item: Any, where: str) -> None:
        """Add one item of the input. Raises InvalidRequestError, UnsupportedFieldError."""
        if not isinstance(item, dict):
            raise InvalidRequestError(f"{where} must be an object with a type", param=where)
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        match kind:
            case "message":
                self._add_message(item, where)
            case "function_call":
                self._add_call(item, where)
            case "function_call_output":
                call_id = _string(item.get("call_id"), f"{where}.call_id")
                content = _text(item.get("output"), f"{where}.output")
                self._messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
            case "reasoning":
                if text := _reasoning(item, where):
                    self._messages.append({"role": "assistant", "reasoning_content": text})
            case _:
                raise UnsupportedFieldError(
                    f"{where}.type is {str(kind)[:40]!r}; this version supports {', '.join(ITEM_TYPES)}",
                    param=f"{where}.type",
                )

    def _add_message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise InvalidRequestError(
                f"{where}.role is {str(role)[:40]!r}; choose one of {', '.join(ROLES)}", param=f"{where}.role"
            )
        raw = item.get("content")
        content = _text(raw, f"{where}.content")
        last = self._messages[-1] if role == "assistant" and self._is_open else {}
        if last and "content" not in last:
            last["content"] = content
        elif "tool_calls" in last:
            self._after_calls.setdefault(len(self._messages) - 1, []).append(content)
        elif role != "assistant" and isinstance(raw, list) and len(raw) > 1:
            self._messages.append({"role": role, "content": _parts(raw)})
        else:
            self._messages.append({"role": role, "content": content})

    def _add_call(self, item: dict[str, Any], where: str) -> None:
        function = {
            "name": check_call_name(item.get("name"), f"{where}.name"),
            "arguments": parse_arguments(item.get("arguments"), f"{where}.arguments"),
        }
        call_id = _string(item.get("call_id"), f"{where}.call_id")
        if not self._is_open:
            self._messages.append({"role": "assistant"})
        message = self._messages[-1]
        message.setdefault("content", None)
        message.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    @property
    def _is_open(self) -> bool:
        return bool(self._messages) and self._messages[-1]["role"] == "assistant"


def _reasoning(item: dict[str, Any], where: str) -> str:
    """Return the reasoning of an item, or else its summary; encrypted reasoning cannot be read."""
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(name)
        if parts is not None and not isinstance(parts, list):
            raise InvalidRequestError(f"{where}.{name} must be a list of parts", param=f"{where}.{name}")
        if parts:
            return _joined(parts, f"{where}.{name}", {kind: "text"})
    return ""


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a string or a list of parts", param=where)
    return _joined(content, where, _TEXTS)


def _parts(parts: list[Any]) -> list[dict[str, str]]:
    """Return the checked parts of a message as the parts of a chat's message."""
    return [{"type": "text", "text": part[_TEXTS[part["type"]]]} for part in parts]


def _joined(parts: list[Any], where: str, texts: dict[str, str]) -> str:
    """Return the texts of the parts, joined by newlines like those of a chat's parts."""
    found = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in texts:
            raise UnsupportedFieldError(
                f"{where}[{index}] is of type {str(kind)[:40]!r}; this version supports {', '.join(texts)}",
                param=f"{where}[{index}]",
            )
        found.append(_string(part.get(texts[kind]), f"{where}[{index}].{texts[kind]}"))
    return "\n".join(found)


def _string(raw: Any, where: str) -> str:
    if not isinstance(raw, str):
        raise InvalidRequestError(f"{where} must be a string", param=where)
    return raw
