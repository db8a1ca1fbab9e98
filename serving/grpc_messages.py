"""Reads the messages and writes the unary answers of public gRPC calls, with limits on number and time.

gRPC itself reads the message of a unary-request call before any of our code runs, with or without a key. Therefore every
such method is registered as one with a stream of requests, which is the same on the wire: its message is read only when it
is needed. Bytes that are not a valid message are the client's error, for which gRPC itself would return UNKNOWN.

"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from contract.errors import (
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    KvbatonError,
    OverloadedError,
)
from serving.fair_places import FairPlaces
from serving.grpc_errors import abort, address_of_peer

_OPEN_SECONDS = 5.0
_MAX_OPEN_STREAMS = 256
"""Limit of streams that need no key, such as health watches, which last until their client ends them."""
_MAX_WAITING = 1024
Hold = Callable[[str, int], AbstractContextManager[None]]
"""Maps (digest of a call's key, bytes of its message) to a context that is held during the call."""
_Req = TypeVar("_Req")
_Res = TypeVar("_Res")


class MessageInterceptor(grpc.aio.ServerInterceptor):
    """Reads the messages of methods with a unary request, and writes the answers of methods with a unary response.

    service: the full name of the service that needs keys, if there are any. max_reads: limit of its messages that are being
    received at once. read_seconds: time limit of each. Messages of other services (health) have their own limits.
    stall_seconds: time for which a client may read nothing of an answer. tenant: returns the digest of the key in a call's
    metadata. hold: counts the bytes of a message of the service until its call ends, or raises OverloadedError.
    """

    def __init__(
        self,
        service: str,
        *,
        max_reads: int = 32,
        read_seconds: float = 60.0,
        stall_seconds: float = 60.0,
        tenant: Callable[[Any], str] = lambda _metadata: "",
        hold: Hold = lambda _tenant, _size: nullcontext(),
    ) -> None:
        self._prefix = f"/{service}/"
        self._read_seconds = read_seconds
        self._stall_seconds = stall_seconds
        self._tenant = tenant
        self._hold = hold
        self._reads = FairPlaces(max_reads, _MAX_WAITING)
        self._open_reads = FairPlaces(max(1, max_reads // 8), _MAX_WAITING)
        self._open_streams = FairPlaces(_MAX_OPEN_STREAMS, max_reads)

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[_Req, _Res] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[_Req, _Res] | None":
        """Return the handler, changed so that it reads its message itself."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return cast("grpc.RpcMethodHandler[_Req, _Res] | None", handler)
        is_ours = str(handler_call_details.method).startswith(self._prefix)
        answering = self._answering(handler, is_ours=is_ours)
        streaming: Any = grpc.stream_stream_rpc_method_handler(answering, None, handler.response_serializer)
        return cast("grpc.RpcMethodHandler[_Req, _Res]", streaming)

    def _answering(self, handler: Any, *, is_ours: bool) -> Callable[[AsyncIterator[bytes], Any], Any]:
        async def answer(messages: AsyncIterator[bytes], context: Any) -> None:
            tenant = self._tenant(context.invocation_metadata()) if is_ours else ""
            caller = (tenant or address_of_peer(context.peer()), context.peer())
            async with AsyncExitStack() as held:
                try:
                    raw = await self._read(messages, caller, is_ours=is_ours)
                    if is_ours:
                        held.enter_context(self._hold(tenant, len(raw)))
                    request = _parsed(handler, raw)
                except KvbatonError as error:
                    await abort(context, error)
                    return
                del raw
                if handler.response_streaming and not is_ours:
                    await self._stream_open(handler.unary_stream, request, context, caller)
                elif handler.response_streaming:
                    await _stream(handler.unary_stream, request, context)
                else:
                    await self._write(context, await handler.unary_unary(request, context))

        return answer

    async def _stream_open(self, behaviour: Any, request: Any, context: Any, caller: tuple[str, str]) -> None:
        try:
            async with self._open_streams.place(*caller):
                await _stream(behaviour, request, context)
        except OverloadedError as error:
            await abort(context, error)

    async def _read(self, messages: AsyncIterator[bytes], caller: tuple[str, str], *, is_ours: bool) -> bytes:
        seconds = self._read_seconds if is_ours else min(_OPEN_SECONDS, self._read_seconds)
        places = self._reads if is_ours else self._open_reads
        try:
            async with asyncio.timeout(seconds), places.place(*caller):
                return await anext(messages)
        except TimeoutError:
            raise DeadlineError(f"the message was not complete after {seconds:g} s") from None
        except StopAsyncIteration:
            raise InvalidRequestError("the call ended without a message") from None

    async def _write(self, context: Any, response: Any) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await context.write(response)
        except TimeoutError:
            await abort(
                context,
                CancelledError(f"the client has read nothing of the answer for {self._stall_seconds:g} s"),
            )


def _parsed(handler: Any, raw: bytes) -> Any:
    try:
        return handler.request_deserializer(raw)
    except DecodeError:
        raise InvalidRequestError("the message cannot be decoded; it is not of the method's type") from None


async def _stream(behaviour: Any, request: Any, context: Any) -> None:
    """Run a method that either writes its answers itself or yields them."""
    answers = behaviour(request, context)
    if hasattr(answers, "__aiter__"):
        async for response in answers:
            await context.write(response)
    else:
        await answers
