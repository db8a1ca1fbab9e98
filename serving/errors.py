"""The one mapping from error kinds to gRPC codes, HTTP statuses and OpenAI error types."""

from typing import Any, assert_never

import grpc

from contract.errors import ErrorKind, KvbatonError

_RETRIABLE = (
    ErrorKind.OVERLOADED,
    ErrorKind.UNAVAILABLE,
    ErrorKind.WORKER_LOST,
    ErrorKind.PEER_UNREACHABLE,
)


def http_status(kind: ErrorKind) -> int:  # noqa: C901 (one flat match)
    """Return the HTTP status of an error kind."""
    match kind:
        case ErrorKind.INVALID_REQUEST | ErrorKind.INVALID_SETTING:
            return 400
        case ErrorKind.UNAUTHENTICATED:
            return 401
        case ErrorKind.NOT_FOUND:
            return 404
        case ErrorKind.PAYLOAD_TOO_LARGE:
            return 413
        case ErrorKind.UNSUPPORTED_MEDIA_TYPE:
            return 415
        case ErrorKind.OVERLOADED:
            return 429
        case ErrorKind.CANCELLED:
            return 499
        case ErrorKind.INTERNAL | ErrorKind.TRANSFER_FAILED | ErrorKind.INCOMPATIBLE:
            return 500
        case ErrorKind.UNAVAILABLE | ErrorKind.WORKER_LOST | ErrorKind.PEER_UNREACHABLE:
            return 503
        case ErrorKind.DEADLINE:
            return 504
        case _:
            assert_never(kind)


def grpc_code(kind: ErrorKind) -> grpc.StatusCode:
    """Return the gRPC status code of an error kind."""
    match kind:
        case ErrorKind.INVALID_REQUEST | ErrorKind.UNSUPPORTED_MEDIA_TYPE:
            return grpc.StatusCode.INVALID_ARGUMENT
        case ErrorKind.INVALID_SETTING | ErrorKind.INCOMPATIBLE:
            return grpc.StatusCode.FAILED_PRECONDITION
        case ErrorKind.UNAUTHENTICATED:
            return grpc.StatusCode.UNAUTHENTICATED
        case ErrorKind.NOT_FOUND:
            return grpc.StatusCode.NOT_FOUND
        case ErrorKind.PAYLOAD_TOO_LARGE | ErrorKind.OVERLOADED:
            return grpc.StatusCode.RESOURCE_EXHAUSTED
        case ErrorKind.CANCELLED:
            return grpc.StatusCode.CANCELLED
        case ErrorKind.INTERNAL | ErrorKind.TRANSFER_FAILED:
            return grpc.StatusCode.INTERNAL
        case ErrorKind.UNAVAILABLE | ErrorKind.WORKER_LOST | ErrorKind.PEER_UNREACHABLE:
            return grpc.StatusCode.UNAVAILABLE
        case ErrorKind.DEADLINE:
            return grpc.StatusCode.DEADLINE_EXCEEDED
        case _:
            assert_never(kind)


def retry_after_seconds(kind: ErrorKind) -> int | None:
    """Return the seconds after which the same request may succeed; None if a retry does not help."""
    return 1 if kind in _RETRIABLE else None


def openai_type(kind: ErrorKind) -> str:
    """Return the ``type`` of an OpenAI error object."""
    status = http_status(kind)
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def openai_error(error: KvbatonError) -> dict[str, Any]:
    """Return the OpenAI error object, ``{"error": {"message", "type", "param", "code"}}``."""
    return {
        "error": {
            "message": error.message,
            "type": openai_type(error.kind),
            "param": error.param,
            "code": error.code or (None if http_status(error.kind) < 500 else error.kind.value),
        }
    }
