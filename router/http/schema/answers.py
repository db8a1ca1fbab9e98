"""The response objects of all endpoints."""

from router.answers.timings import Timings
from router.http.bodies.body import Json
from router.http.messages.formatter import STOP_REASONS
from router.http.schema.files import OBJECTS


def ref(schema: str) -> Json:
    """Return a reference to one of ``ANSWERS``."""
    return {"$ref": f"#/components/schemas/{schema}"}


def _object(optional: tuple[str, ...] = (), /, **properties: Json) -> Json:
    """Return the schema of an object. optional: names of the properties that may be missing."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "required": required, "properties": properties}


_STRING: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_STRING_OR_NULL: Json = {"type": ["string", "null"]}
_FINISH: Json = {"enum": ["stop", "length", "abort", None]}
_SECONDS_AND_SIZES: dict[str, Json] = {
    name: {"type": "number"} for name in ("queue", *Timings.__annotations__, "end_to_end")
}
_ANSWER: dict[str, Json] = {
    "id": _STRING,
    "created": _COUNT,
    "model": _STRING,
    "usage": ref("Usage"),
    "kvbaton": _object(timings=_object(**_SECONDS_AND_SIZES)),
}
_CHOICE: dict[str, Json] = {
    "index": _COUNT,
    "finish_reason": _FINISH,
    "stop_reason": {"type": ["string", "integer", "null"]},
    "logprobs": {"type": ["object", "null"]},
    "token_ids": {"type": "array", "items": _COUNT},
}
_MESSAGE = _object(role={"const": "assistant"}, content=_STRING_OR_NULL, refusal=_STRING_OR_NULL)


def _answer(kind: str, **content: Json) -> Json:
    choice = _object(("token_ids",), **content, **_CHOICE)
    choices: Json = {"type": "array", "minItems": 1, "items": choice}
    return _object(("kvbaton",), object={"const": kind}, choices=choices, **_ANSWER)


ANSWERS: Json = {
    "Error": _object(
        error=_object(message=_STRING, type=_STRING, param=_STRING_OR_NULL, code=_STRING_OR_NULL)
    ),
    "ChatCompletion": _answer("chat.completion", message=_MESSAGE),
    "Completion": _answer("text_completion", text=_STRING),
    "Embeddings": _object(
        object={"const": "list"},
        data={
            "type": "array",
            "items": _object(
                object={"const": "embedding"},
                index=_COUNT,
                embedding={"anyOf": [{"type": "array", "items": {"type": "number"}}, _STRING]},
            ),
        },
        model=_STRING,
        usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "Usage": _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details={"anyOf": [_object(cached_tokens=_COUNT), {"type": "null"}]},
    ),
    "Response": _object(
        ("kvbaton",),
        id=_STRING,
        object={"const": "response"},
        created_at=_COUNT,
        status={"enum": ["completed", "incomplete"]},
        model=_STRING,
        output={"type": "array", "minItems": 1, "items": {"type": "object"}},
        usage=_object(
            input_tokens=_COUNT,
            input_tokens_details=_object(cached_tokens=_COUNT),
            output_tokens=_COUNT,
            output_tokens_details=_object(reasoning_tokens=_COUNT),
            total_tokens=_COUNT,
        ),
        kvbaton=_ANSWER["kvbaton"],
    ),
    "Message": _object(
        ("kvbaton",),
        id=_STRING,
        type={"const": "message"},
        role={"const": "assistant"},
        model=_STRING,
        content={"type": "array", "items": {"type": "object"}},
        stop_reason={"enum": [*STOP_REASONS, None]},
        stop_sequence=_STRING_OR_NULL,
        usage=_object(
            input_tokens=_COUNT,
            cache_creation_input_tokens=_COUNT,
            cache_read_input_tokens=_COUNT,
            output_tokens=_COUNT,
        ),
        kvbaton=_ANSWER["kvbaton"],
    ),
    "MessageTokens": _object(input_tokens=_COUNT),
    "MessageError": _object(
        type={"const": "error"}, error=_object(type=_STRING, message=_STRING), request_id=_STRING
    ),
    "Model": _object(
        id=_STRING,
        object={"const": "model"},
        created=_COUNT,
        owned_by=_STRING,
        max_model_len=_COUNT,
        embeds_only={"type": "boolean"},
    ),
    "ModelList": _object(object={"const": "list"}, data={"type": "array", "items": ref("Model")}),
    "Tokens": _object(
        count=_COUNT,
        max_model_len=_COUNT,
        tokens={"type": "array", "items": _COUNT},
        token_strs={"type": ["array", "null"], "items": _STRING},
    ),
    "Text": _object(prompt=_STRING),
    **OBJECTS,
    "Health": _object(("reason",), status={"enum": ["ok", "degraded", "unavailable"]}, reason=_STRING),
    "Version": _object(version=_STRING),
}
