"""How our errors travel over gRPC: a code, a message, and the details of google.rpc for programs."""

import asyncio
from typing import Any

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

    Raises CancelledError where the call ended before (its deadline passed, its client left), as gRPC itself does.
    """
    status = rpc_status.to_status(_rich(error, request_id))
    trailing = (*status.trailing_metadata, (ERROR_KIND_KEY, error.kind.value))
    try:
        await context.abort(status.code, status.details, trailing)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


def refusing(handler: Any, error: KvbatonError) -> Any:
    """A handler of the same shape that answers every call with this error."""

    async def refuse(_request: object, context: Any) -> None:
        await abort(context, error)

    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)


def _rich(error: KvbatonError, request_id: str) -> Status:
    """ErrorInfo always; BadRequest where a field is at fault, RetryInfo where trying again helps, RequestInfo."""
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
