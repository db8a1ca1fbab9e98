"""The grammar that an answer must match: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and ``guided_*``."""

from collections.abc import Callable
from typing import Any

import msgspec

from contract.errors import InvalidRequestError, UnsupportedFieldError
from contract.json_schema import reduced
from contract.sampling import Grammar
from router.http.bodies.body import Body
from text.parsing.forced import only_objects


def grammar_fields(body: Body, openai_field: str = "response_format") -> dict[str, Any]:
    """Read ``grammar`` and ``grammar_field`` of ``GenerationRequest``. Raises InvalidRequestError that names the field.

    A schema is always enforced, whether it is ``strict`` or not. openai_field: OpenAI's field on this endpoint.
    """
    outer, _, inner = openai_field.partition(".")
    # nearly every body: there is nothing to read or to check
    if body.fields.keys().isdisjoint((outer, *_EXTENSIONS)):
        return {}
    given = {openai_field: body.object(outer).get(inner) if inner else body.get(outer)}
    given |= {name: body.get(name) for name in _EXTENSIONS}
    found = [(name, grammar) for name, value in given.items() if (grammar := _read(name, value))]
    if not found:
        return {}
    if len(found) > 1:
        (first, _), (second, _), *_ = found
        raise InvalidRequestError(f"{second} cannot be combined with {first}", param=second)
    ((name, grammar),) = found
    return {"grammar": grammar, "grammar_field": name}


def _read(name: str, value: Any) -> Grammar | None:
    if value is None:
        return None
    try:
        grammar = _READERS[name](value)
        if grammar:
            grammar = reduced(grammar)
            grammar.check()
    except InvalidRequestError as error:
        # of the same type, which decides the status and the code
        raise type(error)(f"{name}: {error.message}", param=name) from error
    return grammar


def _format(value: Any) -> Grammar | None:
    """Read a format whose name and schema are next to the type or inside ``json_schema``."""
    body = _object(value)
    kind = body.string("type")
    wrapper = body.object("json_schema")
    for named in (body, wrapper):
        named.string("name")
        named.flag("strict")
    schemas = [one for one in (body.get("schema"), wrapper.get("schema")) if one is not None]
    if len(schemas) > 1:
        raise InvalidRequestError("schema cannot be combined with json_schema.schema")
    match kind, schemas:
        case "text", []:
            return None
        case "text", _:
            raise InvalidRequestError("type is 'text', which has no schema; choose json_schema")
        case "json_object", [schema]:
            return _object_by(schema)
        case "json_object", _:
            return Grammar("json_object")
        case "json_schema", [schema]:
            return _schema(schema)
        case "json_schema", _:
            raise InvalidRequestError("json_schema has no schema")
        case other, _:
            raise InvalidRequestError(
                f"type is {str(other)[:40]!r}; choose one of text, json_object, json_schema"
            )


def _object_by(schema: Any) -> Grammar:
    """Return the grammar of a JSON object that matches a schema; the schema may be a string."""
    try:
        found = only_objects(msgspec.json.decode(schema) if isinstance(schema, str) else schema)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(f"schema is not valid JSON: {error}") from error
    if found is None:
        raise InvalidRequestError(
            "type is 'json_object', but the schema allows no object; choose json_schema"
        )
    return Grammar("json_schema", _written(found))


def _structured_outputs(value: Any) -> Grammar | None:
    given = {name: wanted for name, wanted in _object(value).fields.items() if wanted is not None}
    for name in given:
        if name not in _KINDS:
            raise UnsupportedFieldError(f"{name[:40]!r} is not served; choose one of {', '.join(_KINDS)}")
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(given)} cannot be combined")
    return next((_KINDS[name](wanted) for name, wanted in given.items()), None)


def _schema(value: Any) -> Grammar:
    """Return the grammar of a schema; the schema may be a string."""
    return Grammar("json_schema", value if isinstance(value, str) else _written(value))


def _ebnf(value: Any) -> Grammar:
    """Read a grammar: a text, or an object that names its syntax, as in OpenAI's custom tools."""
    if not isinstance(value, dict):
        return Grammar("ebnf", _text(value))
    body = Body(value)
    if body.string("type") not in (None, "grammar"):
        raise InvalidRequestError("type must be grammar")
    syntax = body.string("syntax")
    definition = _text(body.get("definition"))
    match syntax:
        case "lark" | "gbnf" | "regex":
            return Grammar(syntax, definition)
        case None:
            return Grammar("ebnf", definition)
    raise InvalidRequestError(f"syntax is {syntax[:40]!r}; choose one of lark, gbnf, regex")


def _object(value: Any) -> Body:
    if not isinstance(value, dict):
        raise InvalidRequestError("it must be an object")
    return Body(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError("it must be a string")
    return value


def _written(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeError as error:
        raise InvalidRequestError(f"it holds text that is not valid Unicode: {error}") from error


_Reader = Callable[[Any], Grammar | None]
_KINDS: dict[str, _Reader] = {
    "json": _schema,
    "regex": lambda value: Grammar("regex", _text(value)),
    "choice": lambda value: Grammar("choice", _written(value)),
    "grammar": _ebnf,
    "json_object": lambda value: (
        Grammar("json_object") if Body({"json_object": value}).flag("json_object") else None
    ),
}
_EXTENSIONS: dict[str, _Reader] = {
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _KINDS["regex"],
    "guided_choice": _KINDS["choice"],
    "guided_grammar": _ebnf,
}
_READERS = {
    "response_format": _format,
    "text.format": _format,
    "output_config.format": _format,
    "output_format": _format,
    **_EXTENSIONS,
}
