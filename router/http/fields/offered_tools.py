"""The tools of a request: functions as they are, custom tools and namespaces as functions, and those that cannot run here.

A tool that its provider would run (``web_search``, ``image_generation``, ...) does not refuse the request: it is left out,
unless ``tool_choice`` names it. A header of the response and the log name it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from contract.errors import InvalidRequestError, UnsupportedFieldError
from router.http.bodies.body import Body, Json
from text.tools import TEXT_PARAMETERS, Tool, ToolChoice, check_function_name, parse_tool, parse_tool_choice

NO_TOOLS = ToolChoice("none")
_MODES = ("auto", "required")
_SEPARATOR = "__"
_MAX_KIND = 40


@dataclass(frozen=True)
class OfferedTools:
    """The tools that a request offers to the model, and its choice among them.

    tools: functions, in the form of chat templates. choice: the tool choice among them. custom: names of functions whose
    calls are written as those of custom tools. namespaces: function's name → its namespace, and its name there.
    left_out: types of tools that cannot run here, in order, each once.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = NO_TOOLS
    custom: frozenset[str] = frozenset()
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def shown(self) -> tuple[Tool, ...]:
        """The tools that the model sees: none with tool_choice "none"."""
        return () if self.choice.mode == "none" else self.tools


def read_tools(body: Body, *, is_flat: bool = False) -> OfferedTools:
    """Read ``tools`` and ``tool_choice``. is_flat: as in OpenAI's Responses, names and parameters beside the type.

    Raises InvalidRequestError with the index of the tool at fault, UnsupportedFieldError for a choice that cannot run here.
    """
    raw = body.get("tools")
    if raw is not None and not isinstance(raw, list):
        raise InvalidRequestError("tools must be a list of tools", param="tools")
    tools: list[Tool] = []
    custom: set[str] = set()
    namespaces: dict[str, tuple[str, str]] = {}
    # a set that keeps the order of the client
    left_out: dict[str, None] = {}
    for one in _flattened(raw or [], "tools"):
        if one.left_out is not None:
            left_out[one.left_out] = None
            continue
        tool = parse_tool(one.tool, one.where, is_flat=is_flat)
        name = tool["function"]["name"]
        if one.namespace is not None:
            flat = namespaced(one.namespace, name)
            # both parts are names, but joined they may be too long for one
            check_function_name(flat, f"{one.where}.name")
            namespaces[flat] = (one.namespace, name)
            tool = {**tool, "function": {**tool["function"], "name": flat}}
            name = flat
        if one.is_custom:
            custom.add(name)
        tools.append(tool)
    refuse_left_out(body, tuple(left_out))
    found = OfferedTools(tuple(tools), NO_TOOLS, frozenset(custom), namespaces, tuple(left_out))
    return _with_choice(found, body.get("tool_choice"), is_flat)


def refuse_left_out(body: Body, left_out: tuple[str, ...]) -> None:
    """Raise UnsupportedFieldError if a strict service would have to leave tools out."""
    if left_out and body.is_strict:
        raise UnsupportedFieldError(
            f"tools of the type {left_out[0]!r} cannot run here, and strict_api leaves nothing out",
            param="tools",
        )


def namespaced(namespace: str, name: str) -> str:
    """Return the name of a function of a namespace as the model sees it."""
    return f"{namespace}{name}" if namespace.endswith(_SEPARATOR) else f"{namespace}{_SEPARATOR}{name}"


@dataclass(frozen=True)
class _Found:
    """One tool of the list. left_out: its type, if it cannot run here."""

    tool: Any
    where: str
    is_custom: bool = False
    namespace: str | None = None
    left_out: str | None = None


def _flattened(raw: list[Any], where: str, namespace: str | None = None) -> Iterator[_Found]:
    for index, tool in enumerate(raw):
        place = f"{where}[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str) or kind == "function":
            yield _Found(tool, place, namespace=namespace)
        elif kind == "custom":
            yield _Found(_as_function(tool, place), place, is_custom=True, namespace=namespace)
        elif kind == "namespace" and namespace is None:
            inner = tool.get("tools")
            name = tool.get("name")
            check_function_name(name, f"{place}.name")
            if not isinstance(inner, list):
                raise InvalidRequestError(f"{place}.tools must be a list of tools", param=f"{place}.tools")
            yield from _flattened(inner, f"{place}.tools", name)
        else:
            yield _Found(tool, place, left_out=kind[:_MAX_KIND])


def _as_function(tool: Json, where: str) -> Json:
    """Return a custom tool as a function with one string; its format becomes a part of the description."""
    is_nested = "custom" in tool
    given = tool["custom"] if is_nested else tool
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{where}.custom must be an object with a name", param=f"{where}.custom")
    texts = [given.get("description")]
    form = given.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        # the grammar is inside the format, or its fields are those of the format itself
        inner = form.get("grammar")
        grammar = inner if isinstance(inner, dict) else form
        syntax = str(grammar.get("syntax"))[:_MAX_KIND]
        texts.append(f"The input follows this grammar ({syntax}):\n{grammar.get('definition')}")
    if not all(isinstance(text, str | None) for text in texts):
        raise InvalidRequestError(f"{where}.description must be a string", param=f"{where}.description")
    description = "\n\n".join(text for text in texts if text)
    function = {"name": given.get("name"), "description": description, "parameters": TEXT_PARAMETERS}
    return {"type": "function", "function": function} if is_nested else {"type": "function", **function}


def _with_choice(offered: OfferedTools, raw: Any, is_flat: bool) -> OfferedTools:
    tools = offered.tools
    kind = raw.get("type") if isinstance(raw, dict) else None
    if kind == "allowed_tools":
        return replace(offered, choice=_allowed_choice(raw, offered, is_flat))
    if kind == "custom":
        inner = {"name": raw.get("name")} if is_flat else {"function": raw.get("custom")}
        raw = {"type": "function", **inner}
    elif kind == "function" and is_flat and isinstance(raw.get("namespace"), str):
        raw = {"type": "function", "name": namespaced(raw["namespace"], str(raw.get("name")))}
    # an answer without the tool that the client insists on would be wrong, and not only poorer
    elif isinstance(kind, str) and kind in offered.left_out:
        raise UnsupportedFieldError(
            f"tool_choice names a tool of the type {kind[:_MAX_KIND]!r}, which cannot run here",
            param="tool_choice.type",
        )
    if raw == "required" and not tools and offered.left_out:
        raise InvalidRequestError(
            f"tool_choice requires a call, but none of the tools can run here: {', '.join(offered.left_out)[:200]}",
            param="tool_choice",
        )
    choice = parse_tool_choice(raw, tools, is_flat=is_flat)
    return replace(offered, choice=choice)


def _allowed_choice(raw: Json, offered: OfferedTools, is_flat: bool) -> ToolChoice:
    """Return a choice among a part of the tools. Those of types that were left out are left out here as well."""
    where = "tool_choice" if is_flat else "tool_choice.allowed_tools"
    given = raw if is_flat else raw.get("allowed_tools")
    if not isinstance(given, dict) or not isinstance(given.get("tools"), list):
        raise InvalidRequestError(f"{where} must be an object with mode and a list of tools", param=where)
    if given.get("mode") not in _MODES:
        raise InvalidRequestError(f"{where}.mode must be one of {', '.join(_MODES)}", param=f"{where}.mode")
    names: set[str] = set()
    for index, tool in enumerate(given["tools"]):
        names |= _names_of(tool, f"{where}.tools[{index}]", offered, is_flat)
    if given["mode"] == "required" and not names:
        raise InvalidRequestError(
            "tool_choice requires a call, but none of the tools that it allows can run here",
            param="tool_choice",
        )
    return ToolChoice(given["mode"], allowed=frozenset(names))


def _names_of(tool: Any, where: str, offered: OfferedTools, is_flat: bool) -> set[str]:
    """Return the functions that a member of a list of allowed tools names."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind[:_MAX_KIND] in offered.left_out:
        return set()
    inner = tool if is_flat or not isinstance(kind, str) else tool.get(kind)
    name = inner.get("name") if isinstance(inner, dict) else None
    found: set[str] = set()
    if kind == "namespace":
        found = {flat for flat, (namespace, _) in offered.namespaces.items() if namespace == name}
    elif kind in ("function", "custom"):
        has_namespace = isinstance(inner, dict) and isinstance(inner.get("namespace"), str)
        flat = namespaced(inner["namespace"], str(name)) if has_namespace else name
        found = {one["function"]["name"] for one in offered.tools} & {str(flat)}
    if not found:
        raise InvalidRequestError(f"{where} is not one of the tools", param=where)
    return found
