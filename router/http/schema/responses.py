"""The body of /v1/responses."""

from contract.sampling import MAX_LOGPROBS
from router.http.bodies.body import Json
from router.http.responses.conversation import ITEM_TYPES
from router.http.responses.fields import INCLUDABLE, RESPONSE_NEUTRAL, SUMMARIES, TRUNCATIONS
from router.http.schema.chat import CHAT_ONLY, FUNCTION_FIELDS
from router.http.schema.generation import GENERATION
from router.http.schema.grammars import FLAT_FORMAT
from router.http.schema.notation import INT31, described, field, numbers, refused_fields
from router.limits import MAX_MESSAGES

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
            properties={"format": FLAT_FORMAT, "verbosity": CHAT_ONLY["verbosity"]},
        ),
        "tools": field(
            "array",
            "Functions that the model may call.",
            items=described(["type", "name"], {**_FUNCTION, **FUNCTION_FIELDS}),
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
