"""The fields that every endpoint has which generates text."""

from contract.requests import MAX_CHOICES
from contract.sampling import MAX_LOGPROBS, PARAMETERS, Parameter
from router.http.bodies.body import Json
from router.http.fields.unsupported import NEUTRAL, STREAM_NEUTRAL
from router.http.schema.notation import INT31, INT64, MODEL, TOKEN_ID, field, numbers, refused_fields
from router.intake.limits import MAX_STOP_CHARACTERS, MAX_STOPS

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


_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
IGNORED: dict[str, Json] = {
    "user": field("string", "Ignored."),
    "safety_identifier": field("string", "Ignored."),
    "prompt_cache_key": field("string", "Ignored."),
    "metadata": field("object", "Ignored.", additionalProperties={"type": "string"}),
    "service_tier": field("string", "Ignored: there is only one tier."),
    "store": field("boolean", "Ignored: nothing is stored."),
    "prompt_cache_retention": field("string", "Ignored."),
    "client_metadata": field("object", "Ignored.", additionalProperties=True),
    "request_id": field("string", "Ignored: a request's name is the header X-Request-Id."),
    "rid": field("string", "Ignored, as request_id."),
    "prompt_cache_options": field("object", "Ignored.", additionalProperties=True),
    "session_id": field("string", "Ignored: prompts that begin alike share their KV by themselves."),
    "prediction": field("object", "Ignored: it affects only the speed.", additionalProperties=True),
}
_TYPES = {
    "number": "number",
    "integer": "integer",
    "flag": "boolean",
    "token_ids": "array",
    "biases": "object",
}


def _bounds(parameter: Parameter) -> Json:
    low = parameter.low or 0
    high = parameter.high or 0
    match parameter.kind:
        case "flag":
            return {}
        case "token_ids":
            return {"maxItems": parameter.max_items, "items": TOKEN_ID}
        case "biases":
            return {
                "maxProperties": parameter.max_items,
                "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                "additionalProperties": {"type": "number", **numbers(low, high)},
            }
    if parameter.excludes_low:
        return {"exclusiveMinimum": low, "maximum": high}
    # clients send signed numbers of 64 bits at the most, though an engine takes any seed of 64 bits
    return numbers(min(low, parameter.written_for_default or 0), min(high, INT64 - 1))


GENERATION: dict[str, Json] = {
    **refused_fields(NEUTRAL),
    "model": MODEL,
    "max_tokens": field("integer", "Maximum number of new tokens.", **numbers(1, INT31)),
    **{
        parameter.name: field(_TYPES[parameter.kind], parameter.meaning, **_bounds(parameter))
        for parameter in PARAMETERS
        if parameter.meaning
    },
    **GRAMMARS,
    "stop": {
        "description": "Strings that end the answer.",
        "anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP}, {"type": "null"}],
    },
    "include_stop_str_in_output": field("boolean", "Include the stop string in the text. Default: false."),
    "skip_special_tokens": field("boolean", "Omit special and end tokens from the text. Default: true."),
    "stream": field("boolean", "Stream the answer as server-sent events."),
    "stream_options": field(
        "object",
        "Requires stream.",
        properties={
            "include_usage": field("boolean", "Send an additional event with the usage."),
            "include_obfuscation": field("boolean", "Ignored."),
            **refused_fields(STREAM_NEUTRAL),
        },
    ),
    "n": field("integer", "Number of answers to each prompt. Default: 1.", **numbers(1, MAX_CHOICES)),
    "best_of": field(
        "integer",
        "Number of answers of which the n most likely are returned; not with stream. Default: n.",
        **numbers(1, MAX_CHOICES),
    ),
    "prompt_logprobs": field(
        "integer", "Number of alternatives per prompt token; not with stream.", **numbers(0, MAX_LOGPROBS)
    ),
    "return_token_ids": field("boolean", "Return the token ids of each choice."),
    "timings": field("boolean", "Return the latency of each stage, in seconds."),
    "priority": field(
        "integer",
        "Requests with a higher one run earlier (with the setting priority_order a lower one). Default: 0.",
        **numbers(-INT31 - 1, INT31),
    ),
    "cache_salt": field("string", "Prompts with different salts never share cached KV."),
    **IGNORED,
}
