"""The bodies of /tokenize and /detokenize."""

from router.http.schema.chat import CHAT_ONLY, MESSAGES
from router.http.schema.notation import MODEL, TOKEN_ID, described, field

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
