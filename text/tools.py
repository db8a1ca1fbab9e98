"""Checks the tools of a request, its tool choice, and the calls in a conversation.

A custom tool's call is a text, which the model writes as the only argument of a function: see ``TextArgument``.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from contract.errors import InvalidRequestError, UnsupportedFieldError

Tool = dict[str, Any]
"""``{"type": "function", "function": {"name", …}}`` as the client sent it; description and parameters may be missing."""
_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
_MODES = ("none", "auto", "required")
TEXT_NAME = "input"
"""Name of the only argument of a function that stands for a custom tool."""
TEXT_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {TEXT_NAME: {"type": "string"}},
    "required": [TEXT_NAME],
    "additionalProperties": False,
}
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Characters and whole escapes; the rest is the end of the text, or an escape that more text completes.
_WHOLE = re.compile(
    r"""(?:[^"\\]
    |\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\])|(?=\\[^u]))  # the halves of a pair stay together
    |\\u(?![dD][89abAB])[0-9a-fA-F]{4}
    |\\[^u])*""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class ToolChoice:
    """A tool choice: the model may call tools (auto), must (required), must call one (function, by name), or none.

    allowed: the only functions that it may call, though the prompt lists all tools; None: any.
    """

    mode: Literal["none", "auto", "required", "function"]
    name: str | None = None
    allowed: frozenset[str] | None = None

    @property
    def is_forced(self) -> bool:
        """True if the answer must consist of calls."""
        return self.mode in ("required", "function")

    def admits(self, name: str) -> bool:
        """Return True if this function may be called."""
        return self.name in (None, name) and (self.allowed is None or name in self.allowed)


AUTO = ToolChoice("auto")


def parse_tools(raw: Any, *, is_flat: bool = False) -> tuple[Tool, ...]:
    """Check a request's ``tools`` and return them unchanged, with the keys in the client's order.

    is_flat: name, description and parameters are beside the type, as in OpenAI's Responses; they are moved into a
    ``function``, in their order. Raises InvalidRequestError with the index of the tool at fault.
    """
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise InvalidRequestError("tools must be a list of functions", param="tools")
    return tuple(parse_tool(tool, f"tools[{index}]", is_flat=is_flat) for index, tool in enumerate(raw))


def parse_tool(raw: Any, where: str, *, is_flat: bool = False) -> Tool:
    """Check one tool and return it as ``parse_tools`` does. Raises InvalidRequestError that begins with ``where``."""
    if not isinstance(raw, dict):
        content = "name" if is_flat else "function"
        raise InvalidRequestError(f"{where} must be an object with type and {content}", param=where)
    if is_flat:
        # OpenAI's Responses has tools of other types: one of them is no mistake of the client.
        if raw.get("type") != "function":
            raise UnsupportedFieldError(
                f"{where}.type is {_shown(raw.get('type'))}; this version supports 'function'",
                param=f"{where}.type",
            )
        _check_function(raw, where)
        return {"type": "function", "function": {key: value for key, value in raw.items() if key != "type"}}
    if raw.get("type") != "function":
        raise InvalidRequestError(
            f"{where}.type is {_shown(raw.get('type'))}; it must be 'function'", param=f"{where}.type"
        )
    function = raw.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(
            f"{where}.function must be an object with a name", param=f"{where}.function"
        )
    _check_function(function, f"{where}.function")
    return raw


def _check_function(function: dict[str, Any], where: str) -> None:
    check_function_name(function.get("name"), f"{where}.name")
    for name, kind, expected in (("description", str, "a string"), ("parameters", dict, "a JSON schema")):
        if function.get(name) is not None and not isinstance(function[name], kind):
            raise InvalidRequestError(
                f"{where}.{name} is {_shown(function[name])}; it must be {expected}", param=f"{where}.{name}"
            )


def parse_tool_choice(raw: Any, tools: Sequence[Tool], *, is_flat: bool = False) -> ToolChoice:
    """Return a request's ``tool_choice``; the default is auto if there are tools. is_flat: as for tools.

    Raises InvalidRequestError, UnsupportedFieldError.
    """
    where = "tool_choice" if is_flat else "tool_choice.function"
    if raw is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(raw, dict):
        if raw.get("type") != "function":
            raise UnsupportedFieldError(
                f"tool_choice.type is {_shown(raw.get('type'))}; this version supports 'function'",
                param="tool_choice.type",
            )
        function = raw if is_flat else raw.get("function")
        if not isinstance(function, dict):
            raise InvalidRequestError(f"{where} must be an object with a name", param=where)
        choice = ToolChoice("function", check_function_name(function.get("name"), f"{where}.name"))
    elif raw in _MODES:
        choice = ToolChoice(raw)
    else:
        raise InvalidRequestError(
            f"tool_choice is {_shown(raw)}; it must be one of {', '.join(_MODES)}, or name a function",
            param="tool_choice",
        )
    if choice.is_forced and not tools:
        raise InvalidRequestError("tool_choice requires a call, but there are no tools", param="tool_choice")
    if choice.name is not None and choice.name not in [tool["function"]["name"] for tool in tools]:
        raise InvalidRequestError(
            f"{where}.name is {choice.name!r}, which is not one of the tools", param=f"{where}.name"
        )
    return choice


def parse_tool_calls(raw: Any, where: str) -> list[dict[str, Any]]:
    """Check the calls of an assistant's message; their arguments stay unchanged text.

    Raises InvalidRequestError with the index of the call at fault.
    """
    if not isinstance(raw, list):
        raise InvalidRequestError(f"{where} must be a list of calls", param=where)
    return [_parse_tool_call(call, f"{where}[{index}]") for index, call in enumerate(raw)]


def _parse_tool_call(raw: Any, where: str) -> dict[str, Any]:
    custom = raw.get("custom") if isinstance(raw, dict) and raw.get("type") == "custom" else None
    if isinstance(custom, dict) and isinstance(custom.get("input"), str):
        # Templates show only functions, so the model once wrote this call as that of a function with one string.
        kept = {key: value for key, value in raw.items() if key != "custom"}
        as_function = {"name": custom.get("name"), "arguments": as_argument(custom["input"])}
        raw = {**kept, "type": "function", "function": as_function}
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict) or raw.get("type", "function") != "function":
        raise InvalidRequestError(
            f"{where} must be a call of type function, with name and arguments", param=where
        )
    check_call_name(function.get("name"), f"{where}.function.name")
    arguments = parse_arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**raw, "function": {**function, "arguments": arguments}}


def parse_arguments(raw: Any, where: str) -> str:
    """Return the arguments of a call in a conversation as text; a model may have written any text.

    None becomes an empty text; an object, which some clients send, becomes JSON. Raises InvalidRequestError with the field.
    """
    if raw is None:
        return ""
    if isinstance(raw, dict):
        return json.dumps(raw, ensure_ascii=False)
    if not isinstance(raw, str):
        raise InvalidRequestError(
            f"{where} is {_shown(raw)}; it must be the JSON text of the arguments", param=where
        )
    return raw


def check_call_name(raw: Any, where: str) -> str:
    """Return the name of a call in a conversation: any text that is not empty, since a model may have written it."""
    if not isinstance(raw, str) or not raw.strip():
        raise InvalidRequestError(f"{where} is {_shown(raw)}; it must be the name of a function", param=where)
    return raw


def check_function_name(raw: Any, where: str) -> str:
    """Return the name of a function. Raises InvalidRequestError with the field if it is not valid."""
    if not isinstance(raw, str) or not _NAME.fullmatch(raw):
        raise InvalidRequestError(
            f"{where} is {_shown(raw)}; it must be 1..128 letters, digits, dots, dashes and underscores",
            param=where,
        )
    return raw


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def as_argument(text: str) -> str:
    """Return the JSON arguments of a call with this text."""
    return json.dumps({TEXT_NAME: text}, ensure_ascii=False)


def argument_text(arguments: str) -> str:
    """Return the text of a whole call; arguments of another form are the text themselves."""
    argument = TextArgument()
    return argument.push(arguments) + argument.flush()


class TextArgument:
    """Decodes the argument while it is written. Owns the JSON text that was not returned yet."""

    def __init__(self) -> None:
        self._rest = ""
        self._is_inside = False
        self._is_over = False

    def push(self, piece: str) -> str:
        """Return the decoded text of another piece of the arguments, as far as it is certain."""
        if self._is_over:
            return ""
        self._rest += piece
        if not self._is_inside:
            head = _HEAD.match(self._rest)
            if head is None:
                return ""
            self._is_inside = True
            self._rest = self._rest[head.end() :]
        whole = _WHOLE.match(self._rest)
        assert whole is not None, "the pattern matches the empty text"
        self._is_over = self._rest[whole.end() : whole.end() + 1] == '"'
        return self._decode(whole.end())

    def flush(self) -> str:
        """Return the rest: arguments of another form unchanged, and the end of a text that was cut off."""
        rest = "" if self._is_over else self._rest
        self._is_over = True
        return rest

    def _decode(self, end: int) -> str:
        written = self._rest[:end]
        self._rest = self._rest[end:]
        try:
            return str(json.loads(f'"{written}"', strict=False)).encode("utf-8", "replace").decode()
        except ValueError:
            return written
