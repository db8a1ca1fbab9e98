"""Every field of every request body, described once, as JSON Schema.

The code can read no field of a body that is not described here (``Body`` refuses), ``strict_api`` refuses every other
one, and ``/openapi.json`` shows them. A new field is one line.
"""

from typing import Any

from contract.requests import MAX_CHOICES
from contract.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_REPETITION_PENALTY
from router.http.body import UNSERVED, Json
from router.http.fields import NEUTRAL
from router.http.response_fields import INCLUDABLE, RESPONSE_NEUTRAL, SUMMARIES, TRUNCATIONS
from router.http.response_input import ITEM_TYPES
from router.http.thinking import EFFORTS, VERBOSITIES
from router.limits import (
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)
from text.chat import ROLES

MAX_LEGACY_LOGPROBS = 5
INT31 = 2**31 - 1
_INT64 = 2**63


def field(kind: str, meaning: str, **more: Any) -> Json:
    """A field that may be missing or null, both of which mean the default."""
    return {"type": [kind, "null"], "description": meaning, **more}


def numbers(low: float, high: float) -> Json:
    """Return the bounds of a number, both included."""
    return {"minimum": low, "maximum": high}


_TOKEN_ID: Json = {"type": "integer", **numbers(0, INT31)}
_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_MODEL = field("string", "Name of the served model; the one that is served where it is missing.")
_TEXT_PART: Json = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGES: Json = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "description": "The conversation.",
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "minItems": 1, "items": _TEXT_PART},
                    {"type": "null"},
                ]
            },
        },
    },
}
_TOKENS: Json = {"type": "array", "minItems": 1, "items": _TOKEN_ID}
_TEXT: Json = {"type": "string", "minLength": 1}
_PROMPTS: Json = {
    "description": "A text, its token ids, or a list of such.",
    "anyOf": [
        _TEXT,
        _TOKENS,
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
            "items": {"anyOf": [_TEXT, _TOKENS]},
        },
    ],
}

_IGNORED: dict[str, Json] = {
    "user": field("string", "Ignored."),
    "safety_identifier": field("string", "Ignored."),
    "prompt_cache_key": field("string", "Ignored."),
    "metadata": field("object", "Ignored.", additionalProperties={"type": "string"}),
    "service_tier": field("string", "Ignored: there is one."),
    "store": field("boolean", "Ignored: nothing is stored."),
    "prompt_cache_retention": field("string", "Ignored."),
    "client_metadata": field("object", "Ignored.", additionalProperties=True),
    "prediction": field("object", "Ignored: it could only save time.", additionalProperties=True),
}


def refused_fields(neutral: dict[str, tuple[Any, ...]]) -> dict[str, Json]:
    """Return the fields that are refused unless they ask for nothing. neutral: field → values that do not."""
    return {
        name: {"anyOf": [{"type": "null"}, *({"const": idle} for idle in values)], UNSERVED: True}
        for name, values in neutral.items()
    }


_SCHEMA: Json = {"type": ["object", "boolean"], "description": "A JSON schema.", "additionalProperties": True}
_SCHEMA_OR_TEXT: Json = {"type": ["object", "boolean", "string", "null"], "description": "A JSON schema."}
_REGEX = field("string", "A regular expression for the whole answer.", minLength=1)
_CHOICE = field("array", "The possible answers.", minItems=1, items={"type": "string", "minLength": 1})
_EBNF: Json = {
    "description": "A grammar: GBNF (root ::= ...) or Lark (start: ...), found out by parsing it, or named by ``syntax``.",
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
_GRAMMARS: dict[str, Json] = {
    "response_format": field(
        "object",
        "What the answer must match; one of these fields at most. The schema is kept to, strict or not.",
        required=["type"],
        properties={
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "schema": {**_SCHEMA_OR_TEXT, "description": "With type json_object: of the object."},
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
        "The same by the names of vLLM; one of them.",
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
GENERATION: dict[str, Json] = {
    "model": _MODEL,
    "max_tokens": field("integer", "At most this many new tokens.", **numbers(1, INT31)),
    "min_tokens": field("integer", "No end before this many tokens.", **numbers(0, INT31)),
    "temperature": field("number", "0 always takes the most likely token; 1.", **numbers(0, 2)),
    "top_p": field("number", "Keep the smallest set of this probability.", exclusiveMinimum=0, maximum=1),
    "top_k": field("integer", "Keep the k best tokens; 0 and -1 keep all.", **numbers(-1, INT31)),
    "min_p": field("number", "Least share of the best token's probability.", **numbers(0, 1)),
    "seed": field("integer", "Equal seeds give equal answers.", **numbers(-_INT64, _INT64 - 1)),
    "presence_penalty": field("number", "Off logits of tokens in the answer.", **numbers(-2, 2)),
    "frequency_penalty": field("number", "The same, as often as they are there.", **numbers(-2, 2)),
    "repetition_penalty": field(
        "number", "Divides the logits of tokens so far.", exclusiveMinimum=0, maximum=MAX_REPETITION_PENALTY
    ),
    "logit_bias": field(
        "object",
        "Token id → what is added to its logit.",
        maxProperties=MAX_LOGIT_BIASES,
        propertyNames={"pattern": "^[0-9]{1,10}$"},
        additionalProperties={"type": "number", **numbers(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)},
    ),
    "allowed_token_ids": field("array", "If any, no other token is drawn.", items=_TOKEN_ID),
    **_GRAMMARS,
    "stop": {
        "description": "Strings that end the answer.",
        "anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP}, {"type": "null"}],
    },
    "stop_token_ids": field(
        "array", "Token ids that end the answer.", maxItems=MAX_STOP_TOKEN_IDS, items=_TOKEN_ID
    ),
    "include_stop_str_in_output": field("boolean", "Keep what stopped it in the text; false."),
    "skip_special_tokens": field("boolean", "Special and end tokens have no text; true."),
    "ignore_eos": field("boolean", "Do not end at the model's own end tokens."),
    "stream": field("boolean", "Answer by server-sent events."),
    "stream_options": field(
        "object",
        "Only with stream.",
        properties={
            "include_usage": field("boolean", "One more event, with the usage."),
            "include_obfuscation": field("boolean", "Ignored."),
        },
    ),
    "n": field("integer", "Answers to each prompt, which is computed once; 1.", **numbers(1, MAX_CHOICES)),
    "best_of": field(
        "integer", "Of so many answers the n likeliest, where not streamed; n.", **numbers(1, MAX_CHOICES)
    ),
    "prompt_logprobs": field(
        "integer", "Alternatives of each token of the prompt; not streamed.", **numbers(0, MAX_LOGPROBS)
    ),
    "return_token_ids": field("boolean", "Add the token ids to each choice."),
    "timings": field("boolean", "Add the latency split, in seconds."),
    "priority": field("integer", "Higher runs earlier; 0.", **numbers(-INT31 - 1, INT31)),
    "cache_salt": field("string", "Prompts with different salts never share cached KV."),
    **_IGNORED,
    **refused_fields(NEUTRAL),
}


def described(required: list[str], properties: dict[str, Json]) -> Json:
    """Return the schema of a body with these fields."""
    return {"type": "object", "required": required, "properties": properties}


_TOOL: Json = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"},
                "description": field("string", "What it is for."),
                "parameters": field("object", "JSON Schema of its arguments.", additionalProperties=True),
                "strict": field("boolean", "Accepted."),
            },
        },
    },
}
CHAT_ONLY: dict[str, Json] = {
    "tools": field("array", "Functions that the model may call.", items=_TOOL),
    "tool_choice": {
        "description": "Whether it calls them; auto where there are tools.",
        "anyOf": [
            {"enum": ["none", "auto", "required", None]},
            {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": {"type": "string"}},
                    },
                },
            },
        ],
    },
    "parallel_tool_calls": field("boolean", "Whether it may make several calls; true."),
    "documents": field("array", "For templates that know them.", items={"type": "object"}),
    "add_generation_prompt": field("boolean", "Begin an answer behind the messages; true."),
    "continue_final_message": field("boolean", "Go on with the last message; false."),
    "chat_template_kwargs": field(
        "object", "More variables for the chat template.", additionalProperties=True
    ),
    "reasoning_effort": {"enum": [*EFFORTS, None], "description": "For templates that know it."},
    "verbosity": {"enum": [*VERBOSITIES, None], "description": "For templates that know it."},
}
CHAT = described(
    ["messages"],
    {
        "messages": _MESSAGES,
        "max_completion_tokens": field("integer", "OpenAI's new name of max_tokens.", **numbers(1, INT31)),
        "logprobs": field("boolean", "Add log probabilities."),
        "top_logprobs": field("integer", "Alternatives; needs logprobs.", **numbers(0, MAX_LOGPROBS)),
        **GENERATION,
        **CHAT_ONLY,
    },
)
COMPLETION = described(
    ["prompt"],
    {
        "prompt": _PROMPTS,
        "logprobs": field("integer", "How many alternatives.", **numbers(0, MAX_LEGACY_LOGPROBS)),
        "echo": field("boolean", "Show the prompt before the answer; max_tokens may be 0 then."),
        **GENERATION,
        "max_tokens": field("integer", "At most this many new tokens; 0 with echo.", **numbers(0, INT31)),
    },
)
EMBEDDING = described(
    ["input"],
    {
        "model": _MODEL,
        "input": _PROMPTS,
        "encoding_format": {"enum": ["float", "base64", None], "description": "base64: of float32s; float."},
        "dimensions": field("integer", "The model's own number of them, no other.", **numbers(1, INT31)),
        "priority": GENERATION["priority"],
        "cache_salt": GENERATION["cache_salt"],
        "truncate_prompt_tokens": GENERATION["truncate_prompt_tokens"],
        **_IGNORED,
    },
)
_FORMAT = field(
    "object",
    "What the answer must match. The schema is kept to, strict or not.",
    required=["type"],
    properties={
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "name": field("string", "Ignored."),
        "description": field("string", "Ignored."),
        "schema": {**_SCHEMA_OR_TEXT, "description": "A JSON schema, with json_schema or json_object."},
        "strict": field("boolean", "Ignored."),
    },
)
_ITEM: Json = {
    "type": "object",
    "description": "A message, a call, what a call returned, or what the model thought.",
    "properties": {"type": {"enum": [*ITEM_TYPES, None]}},
}
_FUNCTION: Json = {"type": {"const": "function"}}
RESPONSE = described(
    ["input"],
    {
        **GENERATION,
        "input": {
            "description": "A text, or the conversation.",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _ITEM},
            ],
        },
        "instructions": field("string", "A system message before the input."),
        "max_output_tokens": field(
            "integer", "At most this many new tokens, reasoning included.", **numbers(1, INT31)
        ),
        "text": field(
            "object",
            "The form of the answer.",
            properties={"format": _FORMAT, "verbosity": CHAT_ONLY["verbosity"]},
        ),
        "tools": field(
            "array",
            "Functions that the model may call.",
            items=described(["type", "name"], {**_FUNCTION, **_TOOL["properties"]["function"]["properties"]}),
        ),
        "tool_choice": {
            "description": "Whether it calls them; auto where there are tools.",
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                described(["type", "name"], {**_FUNCTION, "name": {"type": "string"}}),
            ],
        },
        "parallel_tool_calls": CHAT_ONLY["parallel_tool_calls"],
        "chat_template_kwargs": CHAT_ONLY["chat_template_kwargs"],
        "include": field("array", "Adds log probabilities.", items={"enum": list(INCLUDABLE)}),
        "top_logprobs": field("integer", "Alternatives of each token.", **numbers(0, MAX_LOGPROBS)),
        "reasoning": field(
            "object",
            "Reasoning comes as the model writes it.",
            properties={
                "effort": CHAT_ONLY["reasoning_effort"],
                "summary": {"enum": [*SUMMARIES, None], "description": "Ignored."},
                "generate_summary": {"enum": [*SUMMARIES, None], "description": "Ignored."},
            },
        ),
        "truncation": {"enum": [*TRUNCATIONS, None], "description": "Ignored: nothing is left out."},
        "stream_options": field(
            "object", "Only with stream.", properties={"include_obfuscation": field("boolean", "Ignored.")}
        ),
        **refused_fields(RESPONSE_NEUTRAL),
    },
)
TOKENIZE = described(
    [],
    {
        "model": _MODEL,
        "prompt": field("string", "The text."),
        "messages": {**_MESSAGES, "type": ["array", "null"], "description": "A chat, in its template."},
        "add_special_tokens": field("boolean", "Default: true for a text, false for messages."),
        **CHAT_ONLY,
        "return_token_strs": field("boolean", "Add what each token is written as."),
    },
)
DETOKENIZE = described(
    ["tokens"],
    {"model": _MODEL, "tokens": {"type": "array", "items": _TOKEN_ID, "description": "Token ids."}},
)
