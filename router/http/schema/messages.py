"""The bodies of /v1/messages and /v1/messages/count_tokens."""

from router.http.bodies.body import Json
from router.http.fields.chat import EFFORTS
from router.http.messages.parser import MESSAGE_NEUTRAL
from router.http.schema.chat import CHAT_ONLY
from router.http.schema.generation import GENERATION
from router.http.schema.notation import INT31, described, field, numbers, refused_fields
from router.intake.limits import MAX_MESSAGES, MAX_STOP_CHARACTERS, MAX_STOPS

_BLOCK: Json = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"type": "string"}},
    "additionalProperties": True,
}
_BLOCKS: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]}
_TOOL: Json = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "type": {"type": ["string", "null"]},
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"},
        "description": field("string", "A description of the function for the model."),
        "input_schema": {"type": "object", "description": "JSON Schema of the input."},
    },
    "additionalProperties": True,
}
_FORMAT: Json = field(
    "object",
    "The format of the answer.",
    required=["type"],
    properties={"type": {"enum": ["text", "json_schema"]}, "schema": {"type": ["object", "null"]}},
)
_SHARED: dict[str, Json] = {
    "model": GENERATION["model"],
    "messages": {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_MESSAGES,
        "description": "The conversation. A last message of the assistant is continued.",
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _BLOCKS},
        },
    },
    "system": {
        "description": "A system message before the conversation.",
        "anyOf": [*_BLOCKS["anyOf"], {"type": "null"}],
    },
    "tools": field(
        "array",
        "Functions that the model may call, of type custom or without a type. Others cannot run here and are left out.",
        items=_TOOL,
    ),
    "tool_choice": field(
        "object",
        "Whether the model calls functions. Default: auto if there are tools.",
        required=["type"],
        properties={
            "type": {"enum": ["auto", "any", "tool", "none"]},
            "name": field("string", "With type tool."),
            "disable_parallel_tool_use": field("boolean", "Allow at most one call. Default: false."),
        },
    ),
    "thinking": field(
        "object",
        "Passed to the chat template; the budget is ignored.",
        required=["type"],
        properties={
            "type": {"enum": ["enabled", "disabled", "adaptive"]},
            "budget_tokens": field("integer", "Ignored."),
            "display": field("string", "Ignored: thinking is always returned."),
        },
        additionalProperties=True,
    ),
    "output_config": field(
        "object",
        "The reasoning effort (passed to the chat template) and the format of the answer.",
        properties={
            "effort": {"enum": [*EFFORTS, None]},
            "format": _FORMAT,
        },
        additionalProperties=True,
    ),
    "output_format": {**_FORMAT, "description": "The older name of output_config.format."},
    "chat_template_kwargs": CHAT_ONLY["chat_template_kwargs"],
    "cache_control": field(
        "object", "Ignored: everything that can be cached is cached.", additionalProperties=True
    ),
    "context_management": field(
        "object", "Ignored: the input is never truncated.", additionalProperties=True
    ),
    "speed": field("string", "Ignored."),
    "inference_geo": field("string", "Ignored."),
    "diagnostics": field("object", "Ignored.", additionalProperties=True),
    "user_profile_id": field("string", "Ignored."),
    "workspace_id": field("string", "Ignored."),
    "metadata": field("object", "Ignored.", additionalProperties=True),
    "service_tier": GENERATION["service_tier"],
}
MESSAGE = described(
    ["messages", "max_tokens"],
    {
        **GENERATION,
        # over those of OpenAI's endpoints, some of which have other names here
        **refused_fields(MESSAGE_NEUTRAL),
        **_SHARED,
        "max_tokens": {
            "type": "integer",
            "description": "Maximum number of new tokens; fewer if the model's length is reached.",
            **numbers(1, INT31),
        },
        "stop_sequences": field(
            "array",
            "Strings that end the answer.",
            maxItems=MAX_STOPS,
            items={"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
        ),
    },
)
COUNT = described(["messages"], _SHARED)
