"""Items of tools that do not run here, in the history of /v1/responses: shown as calls of functions, and as their results.

A client sends back what another provider, or its own sandbox, has written before. The items of hosted tools hold their
results; those of local tools have another item for it. Items of an unknown type follow the same pattern.
"""

import json
from typing import Any

from contract.errors import InvalidRequestError
from router.http.bodies.body import Json
from router.http.fields.offered_tools import namespaced
from text.parsing.text_argument import as_argument
from text.placeholders import outline, placeholder, readable
from text.tools import check_call_name, parse_arguments

_CALL = "_call"
OUTPUT = "_output"
_RESULTS = ("output", "outputs", "results", "error", "result", "tools")
"""Fields of a hosted tool's item that hold its result."""
_NOT_ARGUMENTS = (*_RESULTS, "id", "type", "status", "call_id", "encrypted_content")
_IMAGES = ("image_generation_call",)


def is_call(kind: str) -> bool:
    """Return whether items of this type are calls."""
    return kind.endswith(_CALL)


def is_output(kind: str) -> bool:
    """Return whether items of this type are results of calls."""
    return kind.endswith(OUTPUT)


def call_of(item: Json, where: str) -> Json:
    """Return the call of an item as the call of a function. Raises InvalidRequestError."""
    kind = item["type"]
    match kind:
        case "function_call":
            name = check_call_name(item.get("name"), f"{where}.name")
            arguments = parse_arguments(item.get("arguments"), f"{where}.arguments")
        case "custom_tool_call":
            name = check_call_name(item.get("name"), f"{where}.name")
            arguments = as_argument(string(item.get("input"), f"{where}.input"))
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
    return {"id": call_id_of(item, where), "type": "function", "function": function}


def hosted_result(item: Json) -> str | None:
    """Return the result that a call's item holds itself; None for a call whose result is another item."""
    kind = item["type"]
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


def output_of(item: Json, where: str) -> str:
    """Return the text of a result. Raises InvalidRequestError if it has no ``output``."""
    if "output" not in item:
        shown = {key: value for key, value in item.items() if key not in ("id", "type", "status", "call_id")}
        if item["type"] == "function_call_output" or not shown:
            raise InvalidRequestError(f"{where}.output is missing", param=f"{where}.output")
        return json.dumps(outline(shown), ensure_ascii=False)
    output = item["output"]
    if isinstance(output, int | float):
        raise InvalidRequestError(
            f"{where}.output must be a text or a list of parts", param=f"{where}.output"
        )
    return readable(output)


def call_id_of(item: Json, where: str) -> str:
    """Return the id that links a call and its result; hosted and local tools may have the item's id only."""
    is_own = item["type"] in (
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    )
    call_id = item.get("call_id")
    if call_id is None and not is_own:
        call_id = item.get("id") or f"call_{where}"
    return string(call_id, f"{where}.call_id")


def string(raw: Any, where: str) -> str:
    """Return a string. Raises InvalidRequestError."""
    if not isinstance(raw, str):
        raise InvalidRequestError(f"{where} must be a string", param=where)
    return raw
