"""The document of ``/openapi.json`` (OpenAPI 3.1): every path, with the bodies of ``router.http.schema`` and the answers."""

from collections.abc import Callable
from http import HTTPStatus

from router.answers.timings import Timings
from router.batches.lines import ENDPOINTS
from router.batches.records import BatchStatus, Purpose
from router.http.bodies.body import UNSERVED, Json
from router.http.messages.formatter import STOP_REASONS
from router.http.schema.chat import CHAT, DETOKENIZE, TOKENIZE
from router.http.schema.completion import COMPLETION, EMBEDDING
from router.http.schema.files import BATCH, UPLOAD, WINDOW
from router.http.schema.messages import COUNT, MESSAGE
from router.http.schema.responses import RESPONSE


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
_COUNT_OR_NULL: Json = {"type": ["integer", "null"], "minimum": 0}
_ID: Json = {"type": "string", "minLength": 1}
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


def _list_of(schema: str) -> Json:
    return _object(
        object={"const": "list"},
        data={"type": "array", "items": ref(schema)},
        first_id=_STRING_OR_NULL,
        last_id=_STRING_OR_NULL,
        has_more={"type": "boolean"},
    )


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
        architecture=_object(
            input_modalities={"type": "array", "items": {"const": "text"}},
            output_modalities={"type": "array", "items": {"enum": ["text", "embeddings"]}},
        ),
    ),
    "ModelList": _object(object={"const": "list"}, data={"type": "array", "items": ref("Model")}),
    "Tokens": _object(
        count=_COUNT,
        max_model_len=_COUNT,
        tokens={"type": "array", "items": _COUNT},
        token_strs={"type": ["array", "null"], "items": _STRING},
    ),
    "Text": _object(prompt=_STRING),
    "File": _object(
        id=_ID,
        object={"const": "file"},
        bytes=_COUNT,
        created_at=_COUNT,
        expires_at=_COUNT,
        filename=_STRING,
        purpose={"enum": [purpose.value for purpose in Purpose]},
        status={"const": "processed"},
        status_details={"type": "null"},
    ),
    "FileList": _list_of("File"),
    "DeletedFile": _object(id=_ID, object={"const": "file"}, deleted={"const": True}),
    "Batch": _object(
        id=_ID,
        object={"const": "batch"},
        endpoint={"enum": list(ENDPOINTS)},
        errors={"type": ["object", "null"]},
        input_file_id=_ID,
        completion_window={"const": WINDOW},
        status={"enum": [status.value for status in BatchStatus]},
        output_file_id=_STRING_OR_NULL,
        error_file_id=_STRING_OR_NULL,
        created_at=_COUNT,
        in_progress_at=_COUNT_OR_NULL,
        expires_at=_COUNT,
        finalizing_at=_COUNT_OR_NULL,
        completed_at=_COUNT_OR_NULL,
        failed_at=_COUNT_OR_NULL,
        expired_at=_COUNT_OR_NULL,
        cancelling_at=_COUNT_OR_NULL,
        cancelled_at=_COUNT_OR_NULL,
        request_counts=_object(total=_COUNT, completed=_COUNT, failed=_COUNT),
        metadata={"type": ["object", "null"], "additionalProperties": _STRING},
    ),
    "BatchList": _list_of("Batch"),
    "Health": _object(("reason",), status={"enum": ["ok", "degraded", "unavailable"]}, reason=_STRING),
    "Version": _object(version=_STRING),
}


_JSON = "application/json"
_EVENTS = "text/event-stream"


def document(version: str, *, needs_key: bool, metrics_need_key: bool) -> Json:
    """Return the document. needs_key: True if clients need an API key."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvbaton",
            "version": version,
            "description": "OpenAI's API, and what else this service answers.",
        },
        "paths": _paths(needs_key, metrics_need_key),
        "components": {
            "schemas": ANSWERS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths(needs_key: bool, metrics_need_key: bool) -> Json:
    def closed(operation: Json) -> Json:
        if not needs_key:
            return operation
        answers = {**operation["responses"], "401": _error(401)}
        return {**operation, "security": [{"key": []}], "responses": answers}

    metrics = _get("Prometheus metrics", {"text/plain": {"schema": {"type": "string"}}})
    name: Json = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    one_model = {**_get("One served model", _json("Model"), 404), "parameters": [name]}
    return {
        "/v1/chat/completions": {"post": closed(_generation("Continue a chat", CHAT, "ChatCompletion"))},
        "/v1/completions": {"post": closed(_generation("Continue prompts", COMPLETION, "Completion"))},
        "/v1/embeddings": {"post": closed(_post("Embed prompts", EMBEDDING, _json("Embeddings"), 429, 499))},
        "/v1/responses": {"post": closed(_generation("Answer an input", RESPONSE, "Response"))},
        "/v1/messages": {"post": _of_anthropic(closed(_generation("Answer messages", MESSAGE, "Message")))},
        "/v1/messages/count_tokens": {
            "post": _of_anthropic(
                closed(_post("Count the tokens of messages", COUNT, _json("MessageTokens")))
            )
        },
        "/v1/models": {"get": closed(_get("The served models", _json("ModelList")))},
        "/v1/models/{model}": {"get": closed(one_model)},
        **_file_paths(closed),
        "/tokenize": {"post": closed(_post("Token ids of a prompt", TOKENIZE, _json("Tokens")))},
        "/detokenize": {"post": closed(_post("Text of token ids", DETOKENIZE, _json("Text")))},
        "/health": {"get": _health("Whether a request can be answered now")},
        "/ready": {"get": _health("The same")},
        "/": {"get": _get("A page with links, or JSON", {"text/html": {}, _JSON: {}})},
        "/docs": {"get": _get("A page with every path", {"text/html": {}})},
        "/ping": {"get": _health("The same as /health")},
        "/load": {
            "get": closed(
                _get("Requests that wait or are being answered", {_JSON: {"schema": {"type": "object"}}})
            )
        },
        "/version": {"get": _get("The version", _json("Version"))},
        "/metrics": {"get": closed(metrics) if metrics_need_key else metrics},
        "/openapi.json": {"get": closed(_get("This document", {_JSON: {"schema": {"type": "object"}}}))},
    }


def _file_paths(closed: Callable[[Json], Json]) -> Json:
    file_id = _parameter("file_id", "path")
    batch_id = _parameter("batch_id", "path")
    paging = [
        _parameter("after", "query", {"type": "string"}),
        _parameter("order", "query", {"enum": ["asc", "desc"]}),
        _parameter("limit", "query", {"type": "integer", "minimum": 1}),
    ]
    purpose = _parameter("purpose", "query", {"type": "string"})
    upload = _post("Keep a file", UPLOAD, _json("File"), body_type="multipart/form-data")
    content = _get("The content of a file", {"application/octet-stream": {}}, 404, 503)

    def at(operation: Json, *parameters: Json) -> Json:
        return closed({**operation, "parameters": list(parameters)})

    return {
        "/v1/files": {
            "post": closed(upload),
            "get": at(_get("The files", _json("FileList"), 400, 404, 503), purpose, *paging),
        },
        "/v1/files/{file_id}": {
            "get": at(_get("One file", _json("File"), 404, 503), file_id),
            "delete": at(_get("Delete a file", _json("DeletedFile"), 400, 404, 503), file_id),
        },
        "/v1/files/{file_id}/content": {"get": at(content, file_id)},
        "/v1/batches": {
            "post": closed(_post("Begin a batch", BATCH, _json("Batch"), 429)),
            "get": at(_get("The batches", _json("BatchList"), 400, 404, 503), *paging),
        },
        "/v1/batches/{batch_id}": {"get": at(_get("One batch", _json("Batch"), 404, 503), batch_id)},
        "/v1/batches/{batch_id}/cancel": {
            "post": at(_get("Cancel a batch", _json("Batch"), 400, 404, 503), batch_id)
        },
    }


def _parameter(name: str, place: str, schema: Json | None = None) -> Json:
    return {"name": name, "in": place, "required": place == "path", "schema": schema or _STRING}


def _get(summary: str, content: Json, *errors: int) -> Json:
    found = {"description": "Done", "headers": _REQUEST_ID, "content": content}
    return {"summary": summary, "responses": {"200": found, **{str(e): _error(e) for e in errors}}}


def _health(summary: str) -> Json:
    operation = _get(summary, _json("Health"))
    operation["responses"]["503"] = {"description": "It cannot", "content": _json("Health")}
    return operation


def _served(body: Json) -> Json:
    """Return the description of a body without the fields that are rejected, also in inner objects."""
    fields = body.get("properties")
    if fields is None:
        return body
    # a document that listed them would invite clients to send them
    kept = {name: _served(field) for name, field in fields.items() if UNSERVED not in field}
    return {**body, "properties": kept}


def _post(summary: str, body: Json, content: Json, *errors: int, body_type: str = _JSON) -> Json:
    operation = _get(summary, content, 400, 404, 413, 415, 500, 503, 504, *errors)
    return {**operation, "requestBody": {"required": True, "content": {body_type: {"schema": _served(body)}}}}


def _generation(summary: str, body: Json, answer: str) -> Json:
    content = {**_json(answer), _EVENTS: {}}
    return _post(summary, body, content, 429, 499)


def _of_anthropic(operation: Json) -> Json:
    """Return the operation with Anthropic's error objects."""
    answers = {
        status: answer if status == "200" else {**answer, "content": _json("MessageError")}
        for status, answer in operation["responses"].items()
    }
    return {**operation, "responses": answers}


def _json(schema: str) -> Json:
    return {_JSON: {"schema": ref(schema)}}


def _error(status: int) -> Json:
    reason = "Cancelled by the client" if status == 499 else HTTPStatus(status).phrase
    answer: Json = {"description": reason, "content": _json("Error")}
    if status in (429, 503):
        answer["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds"}}
    return answer


_REQUEST_ID: Json = {
    "X-Request-Id": {"schema": {"type": "string"}, "description": "The request's name, or its id"}
}
