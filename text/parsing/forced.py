"""Forced calls: the JSON schema of an answer that must consist of calls, and the parser of such answers.

For a named function the answer is its arguments, otherwise a list of ``{"name": …, "parameters": {…}}``.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from contract.errors import InvalidRequestError
from text.parsing.parser import ToolParser
from text.parsing.reader import Steps, copy_value
from text.tools import Tool, ToolChoice

Schema = dict[str, Any]
_Place = tuple[()] | tuple["_Place", str]
"""The location of a schema: the keys on the path to it, the last one outermost."""
_VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values are plain JSON, not schemas."""
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values map names to schemas."""


def forced_calls_schema(tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> Schema:
    """Return the JSON schema of the answer that ``choice`` (required, or a function of ``tools``) requires.

    The arguments of a call are always an object, even if the function's schema allows other values, which the parser would
    not accept as a call. parallel: more than one call is allowed. A schema's references to its own root stay valid.
    Raises InvalidRequestError about a function whose schema allows no object.
    """
    schemas: dict[str, Schema] = {}
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name not in schemas and choice.admits(name):
            schemas[name] = _parameters(tool, f"tools[{index}]")
    if choice.name is not None:
        return schemas[choice.name]
    items = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name in schemas
    ]
    calls = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": items},
        "$defs": {name: _moved(schema, f"#/$defs/{name}") for name, schema in schemas.items()},
    }
    return calls if parallel else {**calls, "maxItems": 1}


class ForcedCallsParser(ToolParser):
    """Parses answers in the format of ``forced_calls_schema``. Other text is content.

    name: the named function, if any. model_parser: the parser of the model's own calls, which makes the ids.
    num_earlier_calls: calls in the conversation, which some ids count.
    """

    def __init__(
        self,
        name: str | None = None,
        model_parser: type[ToolParser] = ToolParser,
        *,
        num_earlier_calls: int = 0,
    ) -> None:
        super().__init__()
        self._name = name
        self._new_call_id = lambda called, index: model_parser.new_call_id(called, num_earlier_calls + index)

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


def only_objects(schema: Any) -> Schema | None:
    """Return the JSON schema restricted to objects; None if its type allows no object."""
    if schema is None or schema is True:
        return {"type": "object"}
    types = schema.get("type", "object") if isinstance(schema, dict) else None
    if types == "object" or (isinstance(types, list) and "object" in types):
        return {**schema, "type": "object"}
    return None


def _parameters(tool: Tool, where: str) -> Schema:
    function = tool["function"]
    schema = only_objects(function.get("parameters"))
    if schema is None:
        raise InvalidRequestError(
            f"tool_choice requires a call, but the parameters of {function['name']!r} allow no object, which arguments"
            " always are. Set their type to 'object'",
            param=where,
        )
    return schema


def _moved(schema: Schema, root: str) -> Schema:
    """Return a schema changed for its new location ``root``, instead of its document's root.

    References by anchors become references by pointers, since two schemas in one document may use one anchor.
    """
    anchors = dict(_anchors(schema, root))
    moved: Schema = _with_references(schema, root, anchors)
    return {key: value for key, value in moved.items() if key not in ("$id", "$schema")}


def _anchors(root_schema: Any, root: str) -> Iterator[tuple[str, str]]:
    """Yield the anchors in a schema, each with the pointer to its schema."""
    waiting: list[tuple[Any, _Place]] = [(root_schema, ())]
    while waiting:
        value, place = waiting.pop()
        if isinstance(value, list):
            waiting += [(inner, (place, str(index))) for index, inner in enumerate(value)]
        if isinstance(value, dict):
            if isinstance(value.get("$anchor"), str):
                yield f"#{value['$anchor']}", root + _pointer(place)
            waiting += [(inner, (place, key)) for key, inner in value.items()]


def _pointer(place: _Place) -> str:
    parts: list[str] = []
    while place:
        place, key = place
        parts.append(quote(key.replace("~", "~0").replace("/", "~1")))
    return "".join(f"/{part}" for part in reversed(parts))


def _with_references(value: Any, root: str, anchors: dict[str, str]) -> Any:
    """Return a copy of a schema, or of a list of schemas, whose references are valid below ``root``."""
    if isinstance(value, list):
        return [_with_references(inner, root, anchors) for inner in value]
    if not isinstance(value, dict):
        return value
    out = {key: inner for key, inner in value.items() if key != "$anchor"}
    for key, inner in out.items():
        if key in _NAMED_SCHEMAS and isinstance(inner, dict):
            out[key] = {name: _with_references(one, root, anchors) for name, one in inner.items()}
        elif key not in _VALUES:
            out[key] = _with_references(inner, root, anchors)
    reference = out.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        is_pointer = reference == "#" or reference.startswith("#/")
        out["$ref"] = root + reference[1:] if is_pointer else anchors.get(reference, reference)
    return out
