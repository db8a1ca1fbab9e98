"""The bodies of /v1/chat/completions, and of /tokenize and /detokenize."""

from contract.sampling import MAX_LOGPROBS
from router.http.bodies.body import Json
from router.http.fields.chat import EFFORTS, VERBOSITIES
from router.http.schema.generation import GENERATION
from router.http.schema.notation import INT31, MODEL, TOKEN_ID, described, field, numbers
from router.intake.limits import MAX_MESSAGES
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
    "description": field("string", "A description of the function for the model."),
    "parameters": field("object", "JSON Schema of the arguments.", additionalProperties=True),
    "strict": field(
        "boolean", "Reject parameters with constraints that cannot be enforced, instead of ignoring these."
    ),
}
_TOOL: Json = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"type": "string"},
        "function": described(["name"], FUNCTION_FIELDS),
        "custom": {"type": "object", "description": "A tool whose calls have one text."},
    },
}
ALLOWED_TOOLS: Json = {
    "type": "object",
    "description": "The model may (auto) or must (required) call these tools only, of those that it is shown.",
    "required": ["mode", "tools"],
    "properties": {
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "items": {"type": "object"}},
    },
}
CHAT_ONLY: dict[str, Json] = {
    "tools": field(
        "array",
        "Functions and custom tools that the model may call. Tools of other types cannot run here and are left out.",
        items=_TOOL,
    ),
    "tool_choice": {
        "description": "Whether the model calls functions. Default: auto if there are tools.",
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
            {
                "type": "object",
                "required": ["type", "allowed_tools"],
                "properties": {"type": {"const": "allowed_tools"}, "allowed_tools": ALLOWED_TOOLS},
            },
        ],
    },
    "parallel_tool_calls": field("boolean", "Allow several calls in one answer. Default: true."),
    "documents": field("array", "Passed to the chat template.", items={"type": "object"}),
    "add_generation_prompt": field("boolean", "Begin a new answer after the messages. Default: true."),
    "continue_final_message": field("boolean", "Continue the last message. Default: false."),
    "chat_template_kwargs": field(
        "object", "Additional variables for the chat template.", additionalProperties=True
    ),
    "reasoning_effort": {"enum": [*EFFORTS, None], "description": "Passed to the chat template."},
    "verbosity": {"enum": [*VERBOSITIES, None], "description": "Passed to the chat template."},
}
CHAT = described(
    ["messages"],
    {
        "messages": MESSAGES,
        "max_completion_tokens": field("integer", "OpenAI's newer name of max_tokens.", **numbers(1, INT31)),
        "logprobs": field("boolean", "Return the log probabilities of the tokens."),
        "top_logprobs": field(
            "integer", "Number of alternatives per token; requires logprobs.", **numbers(0, MAX_LOGPROBS)
        ),
        **GENERATION,
        **CHAT_ONLY,
    },
)
TOKENIZE = described(
    [],
    {
        "model": MODEL,
        "prompt": field("string", "The text."),
        "messages": {
            **MESSAGES,
            "type": ["array", "null"],
            "description": "A chat, rendered by the chat template.",
        },
        "add_special_tokens": field("boolean", "Default: true for a text, false for messages."),
        **CHAT_ONLY,
        "return_token_strs": field("boolean", "Return the text of each token."),
    },
)
DETOKENIZE = described(
    ["tokens"],
    {"model": MODEL, "tokens": {"type": "array", "items": TOKEN_ID, "description": "Token ids."}},
)
