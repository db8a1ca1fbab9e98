"""The document of ``/openapi.json`` (OpenAPI 3.1): every path, with the bodies and answers of ``router.http.schema``."""

from collections.abc import Callable
from http import HTTPStatus

from router.http.bodies.body import UNSERVED, Json
from router.http.schema.answers import ANSWERS, ref
from router.http.schema.chat import CHAT
from router.http.schema.completion import COMPLETION
from router.http.schema.embedding import EMBEDDING
from router.http.schema.files import BATCH, UPLOAD
from router.http.schema.messages import COUNT, MESSAGE
from router.http.schema.responses import RESPONSE
from router.http.schema.tokenizing import DETOKENIZE, TOKENIZE

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
_STRING: Json = {"type": "string"}
