"""The tools that a client offers, which of them the model may or must call, and the calls in a conversation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from contract.errors import InvalidRequestError, UnsupportedFieldError

Tool = dict[str, Any]
"""``{"type": "function", "function": {"name", "description", "parameters"}}``; the parameters are a JSON schema."""
_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
_NO_PARAMETERS = {"type": "object", "properties": {}}
_MODES = ("none", "auto", "required")


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may call tools (auto), must (required), must call one (function, by name), or none."""

    mode: Literal["none", "auto", "required", "function"]
    name: str | None = None

    @property
    def is_forced(self) -> bool:
        """The answer has to be calls."""
        return self.mode in ("required", "function")


AUTO = ToolChoice("auto")


def parse_tools(raw: Any, *, is_flat: bool = False) -> tuple[Tool, ...]:
    """A request's ``tools``, as a chat template gets them; functions without parameters take none.

    ``strict`` is not told to the model. is_flat: name, description and parameters stand beside the type, as in OpenAI's
    Responses. Raises InvalidRequestError with the index of the tool at fault.
    """
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise InvalidRequestError("tools must be a list of functions", param="tools")
    parse = _parse_flat_tool if is_flat else _parse_tool
    return tuple(parse(tool, f"tools[{index}]") for index, tool in enumerate(raw))


def _parse_tool(raw: Any, where: str) -> Tool:
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"{where} is no object with type and function", param=where)
    if raw.get("type") != "function":
        raise InvalidRequestError(
            f"{where}.type is {_shown(raw.get('type'))}; it must be 'function'", param=f"{where}.type"
        )
    function = raw.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(f"{where}.function is no object with a name", param=f"{where}.function")
    _check_function(function, f"{where}.function")
    return _tool({name: value for name, value in function.items() if name != "strict"})


def _parse_flat_tool(raw: Any, where: str) -> Tool:
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"{where} is no object with type and name", param=where)
    if raw.get("type") != "function":
        raise UnsupportedFieldError(
            f"{where}.type is {_shown(raw.get('type'))}; this version takes 'function'", param=f"{where}.type"
        )
    _check_function(raw, where)
    return _tool({name: raw.get(name) for name in ("name", "description", "parameters")})


def _tool(function: dict[str, Any]) -> Tool:
    told = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": {"parameters": _NO_PARAMETERS, **told}}


def _check_function(function: dict[str, Any], where: str) -> None:
    check_function_name(function.get("name"), f"{where}.name")
    for name, kind, wanted in (("description", str, "a string"), ("parameters", dict, "a JSON schema")):
        if function.get(name) is not None and not isinstance(function[name], kind):
            raise InvalidRequestError(
                f"{where}.{name} is {_shown(function[name])}; it must be {wanted}", param=f"{where}.{name}"
            )


def parse_tool_choice(raw: Any, tools: Sequence[Tool], *, is_flat: bool = False) -> ToolChoice:
    """A request's ``tool_choice``; by default auto. is_flat: as for tools.

    Raises InvalidRequestError, UnsupportedFieldError.
    """
    where = "tool_choice" if is_flat else "tool_choice.function"
    if raw is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(raw, dict):
        choice = ToolChoice("function", _chosen_name(raw, where))
    elif raw in _MODES:
        choice = ToolChoice(raw)
    else:
        raise InvalidRequestError(
            f"tool_choice is {_shown(raw)}; it must be one of {', '.join(_MODES)}, or name a function",
            param="tool_choice",
        )
    if choice.is_forced and not tools:
        raise InvalidRequestError("tool_choice asks for a call, but there are no tools", param="tool_choice")
    if choice.name is not None and choice.name not in [tool["function"]["name"] for tool in tools]:
        raise InvalidRequestError(
            f"{where}.name is {choice.name!r}, which is none of the tools", param=f"{where}.name"
        )
    return choice


def parse_tool_calls(raw: Any, where: str) -> list[dict[str, Any]]:
    """The calls of an assistant's message, as chat templates get them: arguments are objects, not their JSON text.

    Raises InvalidRequestError with the index of the call at fault.
    """
    if not isinstance(raw, list):
        raise InvalidRequestError(f"{where} must be a list of calls", param=where)
    return [_parse_tool_call(call, f"{where}[{index}]") for index, call in enumerate(raw)]


def _parse_tool_call(raw: Any, where: str) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict) or raw.get("type", "function") != "function":
        raise InvalidRequestError(
            f"{where} is no call of type function, with name and arguments", param=where
        )
    check_function_name(function.get("name"), f"{where}.function.name")
    arguments = parse_arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**raw, "type": "function", "function": {**function, "arguments": arguments}}


def parse_arguments(raw: Any, where: str) -> dict[str, Any]:
    """A call's arguments, from their JSON text; no text is none. Raises InvalidRequestError with the field."""
    if raw is None or raw == "":
        return {}
    try:
        value = msgspec.json.decode(raw) if isinstance(raw, str) else raw
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is not valid JSON: {error}", param=where) from error
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"{where} is {_shown(raw)}; it must be the text of a JSON object", param=where
        )
    return value


def _chosen_name(raw: dict[str, Any], where: str) -> str:
    if raw.get("type") != "function":
        raise UnsupportedFieldError(
            f"tool_choice.type is {_shown(raw.get('type'))}; this version takes 'function'",
            param="tool_choice.type",
        )
    function = raw if where == "tool_choice" else raw.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(f"{where} is no object with a name", param=where)
    return check_function_name(function.get("name"), f"{where}.name")


def check_function_name(raw: Any, where: str) -> str:
    """The name of a function, where it can be one. Raises InvalidRequestError with the field."""
    if not isinstance(raw, str) or not _NAME.fullmatch(raw):
        raise InvalidRequestError(
            f"{where} is {_shown(raw)}; it must be 1..128 letters, digits, dots, dashes and underscores",
            param=where,
        )
    return raw


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
