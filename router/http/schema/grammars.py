"""The fields with the grammar that an answer must match."""

from router.http.bodies.body import Json
from router.http.schema.notation import field

_SCHEMA: Json = {"type": ["object", "boolean"], "description": "A JSON schema.", "additionalProperties": True}
_SCHEMA_OR_TEXT: Json = {"type": ["object", "boolean", "string", "null"], "description": "A JSON schema."}
_REGEX = field("string", "A regular expression for the whole answer.", minLength=1)
_CHOICE = field("array", "The possible answers.", minItems=1, items={"type": "string", "minLength": 1})
_EBNF: Json = {
    "description": "A grammar: GBNF (root ::= ...) or Lark (start: ...), recognised by parsing it, or named by ``syntax``.",
    "anyOf": [
        {"type": "null"},
        {"type": "string", "minLength": 1},
        {
            "type": "object",
            "required": ["definition"],
            "properties": {
                "type": {"enum": ["grammar", None]},
                "syntax": {"enum": ["lark", "gbnf", "regex", None]},
                "definition": {"type": "string", "minLength": 1},
            },
        },
    ],
}
GRAMMARS: dict[str, Json] = {
    "response_format": field(
        "object",
        "The format of the answer; at most one field of this kind. A schema is enforced, with strict or without.",
        required=["type"],
        properties={
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "schema": {**_SCHEMA_OR_TEXT, "description": "With type json_object: the schema of the object."},
            "json_schema": field(
                "object",
                "With type json_schema.",
                required=["schema"],
                properties={
                    "name": field("string", "Ignored."),
                    "description": field("string", "Ignored."),
                    "schema": _SCHEMA,
                    "strict": field("boolean", "Ignored."),
                },
            ),
        },
    ),
    "structured_outputs": field(
        "object",
        "The same constraints by vLLM's names; exactly one of them.",
        properties={
            "json": _SCHEMA_OR_TEXT,
            "regex": _REGEX,
            "choice": _CHOICE,
            "grammar": _EBNF,
            "json_object": field("boolean", "Any JSON object."),
        },
    ),
    "guided_json": _SCHEMA_OR_TEXT,
    "guided_regex": _REGEX,
    "guided_choice": _CHOICE,
    "guided_grammar": _EBNF,
}
FLAT_FORMAT = field(
    "object",
    "The format of the answer. A schema is enforced, with strict or without.",
    required=["type"],
    properties={
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "name": field("string", "Ignored."),
        "description": field("string", "Ignored."),
        "schema": {**_SCHEMA_OR_TEXT, "description": "A JSON schema, with json_schema or json_object."},
        "strict": field("boolean", "Ignored."),
    },
)
"""``text.format`` of /v1/responses: ``response_format`` without the inner object."""
