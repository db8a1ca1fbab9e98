"""The fields that every endpoint has which generates text."""

from contract.requests import MAX_CHOICES
from contract.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_REPETITION_PENALTY
from router.http.bodies.body import Json
from router.http.fields.unsupported import NEUTRAL, STREAM_NEUTRAL
from router.http.schema.grammars import GRAMMARS
from router.http.schema.notation import INT31, INT64, MODEL, TOKEN_ID, field, numbers, refused_fields
from router.intake.limits import MAX_LOGIT_BIASES, MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS, MAX_STOPS

_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
IGNORED: dict[str, Json] = {
    "user": field("string", "Ignored."),
    "safety_identifier": field("string", "Ignored."),
    "prompt_cache_key": field("string", "Ignored."),
    "metadata": field("object", "Ignored.", additionalProperties={"type": "string"}),
    "service_tier": field("string", "Ignored: there is only one tier."),
    "store": field("boolean", "Ignored: nothing is stored."),
    "prompt_cache_retention": field("string", "Ignored."),
    "client_metadata": field("object", "Ignored.", additionalProperties=True),
    "request_id": field("string", "Ignored: a request's name is the header X-Request-Id."),
    "rid": field("string", "Ignored, as request_id."),
    "prompt_cache_options": field("object", "Ignored.", additionalProperties=True),
    "session_id": field("string", "Ignored: prompts that begin alike share their KV by themselves."),
    "prediction": field("object", "Ignored: it affects only the speed.", additionalProperties=True),
}
GENERATION: dict[str, Json] = {
    **refused_fields(NEUTRAL),
    "model": MODEL,
    "max_tokens": field("integer", "Maximum number of new tokens.", **numbers(1, INT31)),
    "min_tokens": field("integer", "Minimum number of new tokens.", **numbers(0, INT31)),
    "temperature": field("number", "0 always selects the most likely token. Default: 1.", **numbers(0, 2)),
    "top_p": field(
        "number",
        "Sample from the smallest set of tokens with this total probability.",
        exclusiveMinimum=0,
        maximum=1,
    ),
    "top_k": field(
        "integer", "Sample from the k most likely tokens; 0 and -1: from all.", **numbers(-1, INT31)
    ),
    "min_p": field("number", "Minimum probability, relative to the most likely token.", **numbers(0, 1)),
    "seed": field(
        "integer", "Equal requests with equal seeds get equal answers.", **numbers(-INT64, INT64 - 1)
    ),
    "presence_penalty": field(
        "number", "Subtracted from the logits of tokens that the answer contains.", **numbers(-2, 2)
    ),
    "frequency_penalty": field(
        "number", "Subtracted once for each time that the answer contains the token.", **numbers(-2, 2)
    ),
    "repetition_penalty": field(
        "number",
        "Divides positive logits of tokens in prompt and answer, multiplies negative ones.",
        exclusiveMinimum=0,
        maximum=MAX_REPETITION_PENALTY,
    ),
    "logit_bias": field(
        "object",
        "Token id → number that is added to its logit.",
        maxProperties=MAX_LOGIT_BIASES,
        propertyNames={"pattern": "^[0-9]{1,10}$"},
        additionalProperties={"type": "number", **numbers(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)},
    ),
    "allowed_token_ids": field("array", "If not empty, only these tokens are sampled.", items=TOKEN_ID),
    **GRAMMARS,
    "stop": {
        "description": "Strings that end the answer.",
        "anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP}, {"type": "null"}],
    },
    "stop_token_ids": field(
        "array", "Token ids that end the answer.", maxItems=MAX_STOP_TOKEN_IDS, items=TOKEN_ID
    ),
    "include_stop_str_in_output": field("boolean", "Include the stop string in the text. Default: false."),
    "skip_special_tokens": field("boolean", "Omit special and end tokens from the text. Default: true."),
    "ignore_eos": field("boolean", "Do not end the answer at the model's end tokens."),
    "stream": field("boolean", "Stream the answer as server-sent events."),
    "stream_options": field(
        "object",
        "Requires stream.",
        properties={
            "include_usage": field("boolean", "Send an additional event with the usage."),
            "include_obfuscation": field("boolean", "Ignored."),
            **refused_fields(STREAM_NEUTRAL),
        },
    ),
    "n": field("integer", "Number of answers to each prompt. Default: 1.", **numbers(1, MAX_CHOICES)),
    "best_of": field(
        "integer",
        "Number of answers of which the n most likely are returned; not with stream. Default: n.",
        **numbers(1, MAX_CHOICES),
    ),
    "prompt_logprobs": field(
        "integer", "Number of alternatives per prompt token; not with stream.", **numbers(0, MAX_LOGPROBS)
    ),
    "return_token_ids": field("boolean", "Return the token ids of each choice."),
    "timings": field("boolean", "Return the latency of each stage, in seconds."),
    "priority": field(
        "integer",
        "Requests with a higher one run earlier (with the setting priority_order a lower one). Default: 0.",
        **numbers(-INT31 - 1, INT31),
    ),
    "cache_salt": field("string", "Prompts with different salts never share cached KV."),
    **IGNORED,
}
