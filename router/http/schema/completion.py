"""The body of /v1/completions."""

from router.http.bodies.body import Json
from router.http.schema.generation import GENERATION
from router.http.schema.notation import INT31, TOKEN_ID, described, field, numbers
from router.limits import MAX_PROMPTS

MAX_LEGACY_LOGPROBS = 5
_TOKENS: Json = {"type": "array", "minItems": 1, "items": TOKEN_ID}
_TEXT: Json = {"type": "string", "minLength": 1}
PROMPTS: Json = {
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
COMPLETION = described(
    ["prompt"],
    {
        "prompt": PROMPTS,
        "logprobs": field("integer", "How many alternatives.", **numbers(0, MAX_LEGACY_LOGPROBS)),
        "echo": field("boolean", "Show the prompt before the answer; max_tokens may be 0 then."),
        **GENERATION,
        "max_tokens": field("integer", "At most this many new tokens; 0 with echo.", **numbers(0, INT31)),
    },
)
