"""Sends kvbaton errors over gRPC: a code, a message, and google.rpc details for programs."""

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from contract.errors import KvbatonError
from serving.errors import grpc_code, retry_after_seconds

ERROR_KIND_KEY = "kvbaton-error-kind"
ERROR_DOMAIN = "kvbaton"


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
