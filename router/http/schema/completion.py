"""The bodies of /v1/completions and /v1/embeddings, which have prompts."""

from contract.requests import POOLING_TYPES
from router.http.bodies.body import Json
from router.http.schema.generation import GENERATION, IGNORED
from router.http.schema.notation import INT31, MODEL, TOKEN_ID, described, field, numbers
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
EMBEDDING = described(
    ["input"],
    {
        "model": MODEL,
        "input": PROMPTS,
        "encoding_format": {
            "enum": ["float", "base64", None],
            "description": "base64 encodes float32 values. Default: float.",
        },
        "dimensions": field("integer", "Must be the model's own number of dimensions.", **numbers(1, INT31)),
        "pooling_type": {
            "enum": [*POOLING_TYPES, None],
            "description": "The hidden states that become the vector. Default: as the model asks.",
        },
        "normalize": field("boolean", "Scale the vector to length 1. Default: true."),
        "priority": GENERATION["priority"],
        "cache_salt": GENERATION["cache_salt"],
        "truncate_prompt_tokens": GENERATION["truncate_prompt_tokens"],
        **IGNORED,
    },
)
