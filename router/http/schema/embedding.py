"""The body of /v1/embeddings."""

from router.http.schema.completion import PROMPTS
from router.http.schema.generation import GENERATION, IGNORED
from router.http.schema.notation import INT31, MODEL, described, field, numbers

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
        "priority": GENERATION["priority"],
        "cache_salt": GENERATION["cache_salt"],
        "truncate_prompt_tokens": GENERATION["truncate_prompt_tokens"],
        **IGNORED,
    },
)
