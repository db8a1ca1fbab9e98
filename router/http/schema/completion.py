"""The body of /v1/completions."""

from router.http.bodies.body import Json
from router.http.schema.generation import GENERATION
from router.http.schema.notation import INT31, TOKEN_ID, described, field, numbers
from router.intake.limits import MAX_PROMPTS

MAX_LEGACY_LOGPROBS = 5
_TOKENS: Json = {"type": "array", "minItems": 1, "items": TOKEN_ID}
_TEXT: Json = {"type": "string", "minLength": 1}
PROMPTS: Json = {
    "description": "A text, its token ids, or a list of these.",
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
        "logprobs": field("integer", "Number of alternatives per token.", **numbers(0, MAX_LEGACY_LOGPROBS)),
        "echo": field("boolean", "Return the prompt before the answer; allows max_tokens 0."),
        **GENERATION,
        "max_tokens": field(
            "integer", "Maximum number of new tokens; 0 is allowed with echo.", **numbers(0, INT31)
        ),
    },
)
