"""The fields that every endpoint has which generates text."""

from contract.requests import MAX_CHOICES
from contract.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_REPETITION_PENALTY
from router.http.bodies.body import Json
from router.http.fields.unsupported import NEUTRAL
from router.http.schema.grammars import GRAMMARS
from router.http.schema.notation import INT31, INT64, MODEL, TOKEN_ID, field, numbers, refused_fields
from router.limits import MAX_LOGIT_BIASES, MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS, MAX_STOPS

_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
IGNORED: dict[str, Json] = {
    "user": field("string", "Ignored."),
    "safety_identifier": field("string", "Ignored."),
    "prompt_cache_key": field("string", "Ignored."),
    "metadata": field("object", "Ignored.", additionalProperties={"type": "string"}),
    "service_tier": field("string", "Ignored: there is one."),
    "store": field("boolean", "Ignored: nothing is stored."),
    "prompt_cache_retention": field("string", "Ignored."),
    "client_metadata": field("object", "Ignored.", additionalProperties=True),
    "prediction": field("object", "Ignored: it could only save time.", additionalProperties=True),
}
GENERATION: dict[str, Json] = {
    "model": MODEL,
    "max_tokens": field("integer", "At most this many new tokens.", **numbers(1, INT31)),
    "min_tokens": field("integer", "No end before this many tokens.", **numbers(0, INT31)),
    "temperature": field("number", "0 always takes the most likely token; 1.", **numbers(0, 2)),
    "top_p": field("number", "Keep the smallest set of this probability.", exclusiveMinimum=0, maximum=1),
    "top_k": field("integer", "Keep the k best tokens; 0 and -1 keep all.", **numbers(-1, INT31)),
    "min_p": field("number", "Least share of the best token's probability.", **numbers(0, 1)),
    "seed": field("integer", "Equal seeds give equal answers.", **numbers(-INT64, INT64 - 1)),
    "presence_penalty": field("number", "Off logits of tokens in the answer.", **numbers(-2, 2)),
    "frequency_penalty": field("number", "The same, as often as they are there.", **numbers(-2, 2)),
    "repetition_penalty": field(
        "number", "Divides the logits of tokens so far.", exclusiveMinimum=0, maximum=MAX_REPETITION_PENALTY
    ),
    "logit_bias": field(
        "object",
        "Token id → what is added to its logit.",
        maxProperties=MAX_LOGIT_BIASES,
        propertyNames={"pattern": "^[0-9]{1,10}$"},
        additionalProperties={"type": "number", **numbers(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)},
    ),
    "allowed_token_ids": field("array", "If any, no other token is drawn.", items=TOKEN_ID),
    **GRAMMARS,
    "stop": {
        "description": "Strings that end the answer.",
        "anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP}, {"type": "null"}],
    },
    "stop_token_ids": field(
        "array", "Token ids that end the answer.", maxItems=MAX_STOP_TOKEN_IDS, items=TOKEN_ID
    ),
    "include_stop_str_in_output": field("boolean", "Keep what stopped it in the text; false."),
    "skip_special_tokens": field("boolean", "Special and end tokens have no text; true."),
    "ignore_eos": field("boolean", "Do not end at the model's own end tokens."),
    "stream": field("boolean", "Answer by server-sent events."),
    "stream_options": field(
        "object",
        "Only with stream.",
        properties={
            "include_usage": field("boolean", "One more event, with the usage."),
            "include_obfuscation": field("boolean", "Ignored."),
        },
    ),
    "n": field("integer", "Answers to each prompt, which is computed once; 1.", **numbers(1, MAX_CHOICES)),
    "best_of": field(
        "integer", "Of so many answers the n likeliest, where not streamed; n.", **numbers(1, MAX_CHOICES)
    ),
    "prompt_logprobs": field(
        "integer", "Alternatives of each token of the prompt; not streamed.", **numbers(0, MAX_LOGPROBS)
    ),
    "return_token_ids": field("boolean", "Add the token ids to each choice."),
    "timings": field("boolean", "Add the latency split, in seconds."),
    "priority": field("integer", "Higher runs earlier; 0.", **numbers(-INT31 - 1, INT31)),
    "cache_salt": field("string", "Prompts with different salts never share cached KV."),
    **IGNORED,
    **refused_fields(NEUTRAL),
}
