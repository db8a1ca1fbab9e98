"""The ``input`` of /v1/responses: items become the messages of a chat template.

A client sends back what another provider, or its own sandbox, has written before: items of tools that do not run here are
shown as calls of functions, and as their results. The items of hosted tools hold their results; those of local tools have
another item for it. Items of an unknown type follow the same pattern.
"""

import json
from typing import Any

from contract.errors import InvalidRequestError
from router.http.bodies.body import Body, Json
from router.http.fields.chat import template_kwargs
from router.http.fields.offered_tools import OfferedTools, namespaced
from router.intake.limits import MAX_MESSAGES
from text.chat import Chat, Message, drop_transport_lines, not_text, outline, placeholder, readable
from text.tools import as_argument, check_call_name, parse_arguments

_CALL = "_call"
_OUTPUT = "_output"
_RESULTS = ("output", "outputs", "results", "error", "result", "tools")
"""Fields of a hosted tool's item that hold its result."""
_NOT_ARGUMENTS = (*_RESULTS, "id", "type", "status", "call_id", "encrypted_content")
_IMAGES = ("image_generation_call",)
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
                self._add_reference(_string(item.get("id"), f"{where}.id"))
            case str() if kind.endswith(_CALL):
                self._add_call(item, where)
            case str() if kind.endswith(_OUTPUT):
                call_id = _call_id_of(item, where)
                content = _output_of(item, where)
                self._messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
            case str():
                self._messages.append({"role": "user", "content": placeholder(kind)})
            case _:
                raise InvalidRequestError(f"{where}.type must be a string", param=f"{where}.type")

    def _add_reference(self, item_id: str) -> None:
        """Add a placeholder for an item that another service stores."""
        if not item_id.startswith("rs_"):  # reasoning, which most prompts leave out
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
        # a chat's message has its text before its calls, so a text behind them is kept for the end of it
        elif "tool_calls" in last:
            self._after_calls.setdefault(len(self._messages) - 1, []).append(content)
        elif role != "assistant" and isinstance(raw, list) and len(raw) > 1:
            # Their types were checked before.
            parts = [{"type": "text", "text": part[_TEXTS[part["type"]]]} for part in raw]
            self._messages.append({"role": role, "content": parts})
        else:
            self._messages.append({"role": role, "content": content})

    def _add_call(self, item: dict[str, Any], where: str) -> None:
        call = _call_of(item, where)
        if not self._is_open:
            self._messages.append({"role": "assistant"})
        message = self._messages[-1]
        message.setdefault("content", None)
        message.setdefault("tool_calls", []).append(call)
        if (result := _hosted_result(item)) is not None:
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


def _text(content: Any, where: str, *, is_lenient: bool) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a string or a list of parts", param=where)
    return _joined(content, where, _TEXTS, is_lenient=is_lenient)


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
            raise not_text(f"{where}[{index}]", kind, *texts)
        found.append(_string(part.get(texts[kind]), f"{where}[{index}].{texts[kind]}"))
    return "\n".join(found)


def _call_of(item: Json, where: str) -> Json:
    """Return the call of an item as the call of a function. Raises InvalidRequestError."""
    kind = item["type"]
    match kind:
        case "function_call":
            name = check_call_name(item.get("name"), f"{where}.name")
            arguments = parse_arguments(item.get("arguments"), f"{where}.arguments")
        case "custom_tool_call":
            name = check_call_name(item.get("name"), f"{where}.name")
            arguments = as_argument(_string(item.get("input"), f"{where}.input"))
        case "mcp_call":
            name = check_call_name(item.get("name"), f"{where}.name")
            arguments = parse_arguments(item.get("arguments"), f"{where}.arguments")
        case _:
            name = kind.removesuffix(_CALL) or kind
            given = {key: value for key, value in item.items() if key not in _NOT_ARGUMENTS}
            arguments = json.dumps(outline(given), ensure_ascii=False)
    if isinstance(item.get("namespace"), str):
        name = namespaced(item["namespace"], name)
    function = {"name": name, "arguments": arguments}
    return {"id": _call_id_of(item, where), "type": "function", "function": function}


def _hosted_result(item: Json) -> str | None:
    """Return the result that a call's item holds itself; None for a call whose result is another item."""
    kind = item["type"]
    # the client runs these, and sends the result as an item of its own
    if kind in ("function_call", "custom_tool_call") or isinstance(item.get("call_id"), str):
        return None
    if kind == "local_shell_call":
        return None
    found = [item[name] for name in _RESULTS if item.get(name)]
    if kind in _IMAGES and found:
        return placeholder("image")
    if found:
        return "\n".join(readable(one) for one in found)
    return f"[{kind}: {str(item.get('status') or 'completed')[:40]}, its result is not a part of the conversation]"


def _output_of(item: Json, where: str) -> str:
    """Return the text of a result. Raises InvalidRequestError if it has no ``output``."""
    if "output" not in item:
        shown = {key: value for key, value in item.items() if key not in ("id", "type", "status", "call_id")}
        if item["type"] == "function_call_output" or not shown:
            raise InvalidRequestError(f"{where}.output is missing", param=f"{where}.output")
        return json.dumps(outline(shown), ensure_ascii=False)
    output = item["output"]
    if isinstance(output, list) and all(isinstance(part, dict) for part in output):
        # parts of known types must have their text, others become placeholders
        return _joined(output, f"{where}.output", _TEXTS, is_lenient=True)
    if isinstance(output, int | float):
        raise InvalidRequestError(
            f"{where}.output must be a text or a list of parts", param=f"{where}.output"
        )
    return readable(output)


def _call_id_of(item: Json, where: str) -> str:
    """Return the id that links a call and its result; hosted and local tools may have the item's id only."""
    is_own = item["type"] in (
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    )
    call_id = item.get("call_id")
    if call_id is None and not is_own:
        # a call without any id still needs one that its result names
        call_id = item.get("id") or f"call_{where}"
    return _string(call_id, f"{where}.call_id")


def _string(raw: Any, where: str) -> str:
    """Return a string. Raises InvalidRequestError."""
    if not isinstance(raw, str):
        raise InvalidRequestError(f"{where} must be a string", param=where)
    return raw
