"""The body of /v1/chat/completions."""

from contract.sampling import MAX_LOGPROBS
from router.http.bodies.body import Json
from router.http.fields.thinking import EFFORTS, VERBOSITIES
from router.http.schema.generation import GENERATION
from router.http.schema.notation import INT31, described, field, numbers
from router.limits import MAX_MESSAGES
from text.chat import ROLES

_TEXT_PART: Json = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
MESSAGES: Json = {
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
FUNCTION_FIELDS: Json = {
    "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"},
    "description": field("string", "What it is for."),
    "parameters": field("object", "JSON Schema of its arguments.", additionalProperties=True),
    "strict": field("boolean", "Accepted."),
}
_TOOL = described(
    ["type", "function"],
    {"type": {"const": "function"}, "function": described(["name"], FUNCTION_FIELDS)},
)
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
        "messages": MESSAGES,
        "max_completion_tokens": field("integer", "OpenAI's new name of max_tokens.", **numbers(1, INT31)),
        "logprobs": field("boolean", "Add log probabilities."),
        "top_logprobs": field("integer", "Alternatives; needs logprobs.", **numbers(0, MAX_LOGPROBS)),
        **GENERATION,
        **CHAT_ONLY,
    },
)
