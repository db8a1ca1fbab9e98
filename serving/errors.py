"""The one mapping from error kinds to gRPC codes, HTTP statuses and OpenAI error types.

Over gRPC an error is a code, a message, and google.rpc details for programs.
"""

import asyncio
from collections.abc import Callable
from typing import Any, assert_never
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from contract.errors import ErrorKind, KvbatonError

_RETRIABLE = (ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE, ErrorKind.WORKER_LOST, ErrorKind.PEER_UNREACHABLE)
ERROR_KIND_KEY = "kvbaton-error-kind"
ERROR_DOMAIN = "kvbaton"


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


def openai_error(error: KvbatonError) -> dict[str, Any]:
    """Return the OpenAI error object, ``{"error": {"message", "type", "param", "code"}}``."""
    status = http_status(error.kind)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": "rate_limit_error" if status == 429 else kind,
            "param": error.param,
            "code": error.code or (None if status < 500 else error.kind.value),
        }
    }


async def abort(context: Any, error: KvbatonError, request_id: str = "") -> None:
    """End a call with an error's code, message and details. Does not return.

    Raises CancelledError, as gRPC does, if the call has ended before (deadline, disconnected client).
    """
    status = rpc_status.to_status(_rich(error, request_id))
    trailing = (*status.trailing_metadata, (ERROR_KIND_KEY, error.kind.value))
    try:
        await context.abort(status.code, status.details, trailing)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


def refusing(handler: Any, error: KvbatonError, note: Callable[[str], None] = lambda _: None) -> Any:
    """Return a handler that answers every call with this error without reading its message.

    note: called with the client's address. Clients see no difference to a method of another arity.
    """

    async def refuse(_messages: object, context: Any) -> None:
        note(address_of_peer(context.peer()))
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse, None, handler.response_serializer)


def address_of_peer(peer: str) -> str:
    """Return the address in gRPC's name of a peer, such as "ipv4:127.0.0.1:50000" or "ipv6:%5B::1%5D:50000".

    Behind a front (``grpc_front``) this name is the last part of a path, "unix:/tmp/folder/ipv4:127.0.0.1:50000".
    """
    kind, _, rest = unquote(peer).rpartition("/")[2].partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else peer


def _rich(error: KvbatonError, request_id: str) -> Status:
    """Build the status with ErrorInfo and, if they apply, BadRequest, RetryInfo and RequestInfo."""
    code: tuple[int, str] = grpc_code(error.kind).value
    facts = {"code": error.code} if error.code else {}
    details: list[Message] = [ErrorInfo(reason=error.kind.value.upper(), domain=ERROR_DOMAIN, metadata=facts)]
    if error.param:
        violation = BadRequest.FieldViolation(field=error.param, description=error.message)
        details.append(BadRequest(field_violations=[violation]))
    if (seconds := retry_after_seconds(error.kind)) is not None:
        details.append(RetryInfo(retry_delay=Duration(seconds=seconds)))
    if request_id:
        details.append(RequestInfo(request_id=request_id))
    status = Status(code=code[0], message=error.message)
    for detail in details:
        status.details.add().Pack(detail)
    return status
