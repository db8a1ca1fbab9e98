"""The ``input`` of /v1/responses: items become the messages of a chat template."""

from typing import Any

from contract.errors import InvalidRequestError, UnsupportedFieldError
from router.http.bodies.body import Body
from router.http.fields.chat import template_kwargs
from router.http.fields.offered_tools import OfferedTools
from router.http.responses.builtin_items import (
    call_id_of,
    call_of,
    hosted_result,
    is_call,
    is_output,
    output_of,
    string,
)
from router.intake.limits import MAX_MESSAGES
from text.chat import Chat, Message
from text.placeholders import placeholder, readable
from text.transport_lines import drop_transport_lines

ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Type of a message's part → the field that holds its text."""


def response_chat(body: Body, offered: OfferedTools) -> Chat:
    """Read the conversation: ``instructions`` as a system message, then ``input``. offered: the body's tools.

    Raises InvalidRequestError that names the wrong item, UnsupportedFieldError.
    """
    instructions = body.string("instructions")
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    return Chat(
        messages=drop_transport_lines(messages + _messages(body.get("input"))),
        tools=offered.shown,
        tool_choice=offered.choice,
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
        self._num_references = 0
        self._after_calls: dict[int, list[str]] = {}
        """Texts that follow the calls of a message, by its index."""

    def messages(self) -> list[Message]:
        """Return all messages. Raises InvalidRequestError if there is none."""
        if len(self._messages) == self._num_references:
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
            case "reasoning":
                if text := _reasoning(item, where):
                    self._messages.append({"role": "assistant", "reasoning_content": text})
            case "item_reference":
                self._add_reference(string(item.get("id"), f"{where}.id"))
            case str() if is_call(kind):
                self._add_call(item, where)
            case str() if is_output(kind):
                call_id = call_id_of(item, where)
                content = _result_text(item, where)
                self._messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
            case str():
                self._messages.append({"role": "user", "content": placeholder(kind)})
            case _:
                raise InvalidRequestError(f"{where}.type must be a string", param=f"{where}.type")

    def _add_reference(self, item_id: str) -> None:
        """Add a placeholder for an item that another service stores. Reasoning is left out, as most prompts leave it out."""
        if not item_id.startswith("rs_"):
            self._num_references += 1
            self._messages.append({"role": "user", "content": placeholder("item_reference")})

    def _add_message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise InvalidRequestError(
                f"{where}.role is {str(role)[:40]!r}; choose one of {', '.join(ROLES)}", param=f"{where}.role"
            )
        raw = item.get("content")
        content = _text(raw, f"{where}.content", is_lenient=role == "assistant")
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
        call = call_of(item, where)
        if not self._is_open:
            self._messages.append({"role": "assistant"})
        message = self._messages[-1]
        message.setdefault("content", None)
        message.setdefault("tool_calls", []).append(call)
        if (result := hosted_result(item)) is not None:
            self._messages.append({"role": "tool", "content": result, "tool_call_id": call["id"]})

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
            return _joined(parts, f"{where}.{name}", {kind: "text"}, is_lenient=True)
    return ""


def _result_text(item: dict[str, Any], where: str) -> str:
    """Return the text of a result; parts of known types must have their text, others become placeholders."""
    output = item.get("output")
    if isinstance(output, list) and all(isinstance(part, dict) for part in output):
        return _joined(output, f"{where}.output", _TEXTS, is_lenient=True)
    return output_of(item, where)


def _text(content: Any, where: str, *, is_lenient: bool) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a string or a list of parts", param=where)
    return _joined(content, where, _TEXTS, is_lenient=is_lenient)


def _parts(parts: list[Any]) -> list[dict[str, str]]:
    """Return the checked parts of a message as the parts of a chat's message."""
    return [{"type": "text", "text": part[_TEXTS[part["type"]]]} for part in parts]


def _joined(parts: list[Any], where: str, texts: dict[str, str], *, is_lenient: bool) -> str:
    """Return the texts of the parts, joined by newlines like those of a chat's parts.

    is_lenient: parts of other types get a placeholder, as in answers and results, which a client cannot take back.
    """
    found = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in texts and is_lenient:
            found.append(readable(part))
            continue
        if not isinstance(kind, str) or kind not in texts:
            raise UnsupportedFieldError(
                f"{where}[{index}] is of type {str(kind)[:40]!r}; this version supports {', '.join(texts)}",
                param=f"{where}[{index}]",
            )
        found.append(string(part.get(texts[kind]), f"{where}[{index}].{texts[kind]}"))
    return "\n".join(found)
