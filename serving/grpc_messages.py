"""What is no message of a method's type is the client's mistake; gRPC itself calls it UNKNOWN and logs a traceback."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from contract.errors import InvalidRequestError
from serving.grpc_errors import abort

_Req = TypeVar("_Req")
_Res = TypeVar("_Res")


class MessageInterceptor(grpc.aio.ServerInterceptor):
    """Answers bytes that cannot be read with INVALID_ARGUMENT. service: the full name of the one that it looks after.

    Its methods take one message each, and are coroutines.
    """

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[_Req, _Res] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[_Req, _Res] | None":
        """The same handler, which reads its message itself."""
        handler = await continuation(handler_call_details)
        if handler is None or not str(handler_call_details.method).startswith(self._prefix):
            return handler
        return cast("grpc.RpcMethodHandler[_Req, _Res]", _reading(handler))


def _reading(handler: Any) -> Any:
    async def answer(raw: bytes, context: Any) -> Any:
        try:
            request = handler.request_deserializer(raw)
        except DecodeError:
            await abort(
                context, InvalidRequestError("the message cannot be read; it is not of the method's type")
            )
        return await behaviour(request, context)

    if handler.response_streaming:
        behaviour = handler.unary_stream
        return grpc.unary_stream_rpc_method_handler(answer, None, handler.response_serializer)
    behaviour = handler.unary_unary
    return grpc.unary_unary_rpc_method_handler(answer, None, handler.response_serializer)
