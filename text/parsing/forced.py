"""Answers that a grammar forces to be calls: their JSON schema, and the parser of what is written by it.

The answer to a named function is its arguments; else it is a list of ``{"name": …, "parameters": {…}}``.
"""

from collections.abc import Sequence
from typing import Any

from text.parsing.json_text import copy_value
from text.parsing.parser import ToolParser
from text.parsing.reader import Steps
from text.tools import Tool, ToolChoice

Schema = dict[str, Any]


def forced_calls_schema(tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> Schema:
    """The JSON schema of the answer that ``choice`` (required, or a function of ``tools``) asks for.

    parallel: more than one call is allowed. A schema's references to its own root stay valid.
    """
    schemas: dict[str, Schema] = {}
    for tool in tools:
        schemas.setdefault(tool["function"]["name"], tool["function"]["parameters"])
    if choice.name is not None:
        return schemas[choice.name]
    calls = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call_schema(name) for name in schemas]},
        "$defs": {name: _moved(schema, f"#/$defs/{name}") for name, schema in schemas.items()},
    }
    return calls if parallel else {**calls, "maxItems": 1}


class ForcedCallsParser(ToolParser):
    """The calls of an answer by ``forced_calls_schema``; name: the function that was named. What breaks it is content."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self._name = name

    def _read(self) -> Steps[None]:
        reader = self._reader
        reader.hold()
        yield from reader.skip_space()
        if self._name is None:
            if (yield from reader.skip("[")):
                yield from self._read_list()
        elif (yield from reader.peek()) == "{":
            self._begin(self._name)
            yield from copy_value(reader, self._arguments)
        if reader.is_held:
            self._give_back()
        else:
            yield from self._skip_space()
        yield from reader.copy_rest(self._content)


def _call_schema(name: str) -> Schema:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Schema, root: str) -> Schema:
    """A schema that does not stand at the root any more, but at ``root``."""
    moved: Schema = _with_references(schema, root)
    return {key: value for key, value in moved.items() if key not in ("$id", "$schema")}


def _with_references(value: Any, root: str) -> Any:
    if isinstance(value, list):
        return [_with_references(inner, root) for inner in value]
    if not isinstance(value, dict):
        return value
    out = {key: _with_references(inner, root) for key, inner in value.items()}
    reference = out.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        out["$ref"] = root + reference[1:]
    return out
