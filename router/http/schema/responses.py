"""The body of /v1/responses."""

from contract.sampling import MAX_LOGPROBS
from router.http.bodies.body import Json
from router.http.responses.parser import INCLUDABLE, RESPONSE_NEUTRAL, SUMMARIES, TRUNCATIONS
from router.http.schema.chat import ALLOWED_TOOLS, CHAT_ONLY, FUNCTION_FIELDS
from router.http.schema.generation import FLAT_FORMAT, GENERATION
from router.http.schema.notation import INT31, described, field, numbers, refused_fields
from router.intake.limits import MAX_MESSAGES

_ITEM: Json = {
    "type": "object",
    "description": "A message, a call, the result of a call, or reasoning. Items of tools that do not run here are shown"
    " as calls and results; what is not text there is shown as a placeholder.",
    "properties": {"type": {"type": ["string", "null"]}},
}
_FUNCTION: Json = {"type": {"const": "function"}}
TOOL: Json = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"type": "string"}, **FUNCTION_FIELDS},
    "additionalProperties": True,
}
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
            "integer", "Maximum number of new tokens, reasoning included.", **numbers(1, INT31)
        ),
        "text": field(
            "object",
            "The format and the verbosity of the answer.",
            properties={"format": FLAT_FORMAT, "verbosity": CHAT_ONLY["verbosity"]},
        ),
        "tools": field(
            "array",
            "Functions that the model may call, custom tools and namespaces of both. Tools of other types cannot run here"
            " and are left out.",
            items=TOOL,
        ),
        "tool_choice": {
            "description": "Whether the model calls functions. Default: auto if there are tools.",
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                described(["type", "name"], {**_FUNCTION, "name": {"type": "string"}}),
                {
                    **ALLOWED_TOOLS,
                    "required": ["type", *ALLOWED_TOOLS["required"]],
                    "properties": {"type": {"const": "allowed_tools"}, **ALLOWED_TOOLS["properties"]},
                },
            ],
        },
        "parallel_tool_calls": CHAT_ONLY["parallel_tool_calls"],
        "chat_template_kwargs": CHAT_ONLY["chat_template_kwargs"],
        "include": field("array", "Additional output: log probabilities.", items={"enum": list(INCLUDABLE)}),
        "top_logprobs": field("integer", "Number of alternatives per token.", **numbers(0, MAX_LOGPROBS)),
        "reasoning": field(
            "object",
            "Reasoning is returned as the model writes it.",
            properties={
                "effort": CHAT_ONLY["reasoning_effort"],
                "summary": {"enum": [*SUMMARIES, None], "description": "Ignored."},
                "generate_summary": {"enum": [*SUMMARIES, None], "description": "Ignored."},
            },
        ),
        "truncation": {"enum": [*TRUNCATIONS, None], "description": "Ignored: the input is never truncated."},
        "stream_options": field(
            "object", "Requires stream.", properties={"include_obfuscation": field("boolean", "Ignored.")}
        ),
        **refused_fields(RESPONSE_NEUTRAL),
    },
)
