"""Anthropic's error object, on the paths of Anthropic's API."""

from typing import Any

from aiohttp import web

from contract.errors import KvbatonError
from serving.errors import http_status

PATH = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "api_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_messages_path(request: web.Request) -> bool:
    """Return True for a request to Anthropic's API."""
    return request.path == PATH or request.path.startswith(f"{PATH}/")


def messages_error(error: KvbatonError, request_id: str) -> dict[str, Any]:
    """Return ``{"type": "error", "error": {"type", "message"}, "request_id"}``. It has no field for ``param``."""
    shown = {"type": _TYPES[http_status(error.kind)], "message": error.message}
    return {"type": "error", "error": shown, "request_id": request_id}
