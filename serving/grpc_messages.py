"""Checks the API keys of public gRPC calls, reads their messages and writes unary answers, with limits on number and time.

A key is in the metadata ``authorization: Bearer KEY``. gRPC itself reads the message of a unary-request call before any of
our code runs, with or without a key. Therefore every such method is registered as one with a stream of requests, which is
the same on the wire: its message is read only when it is needed. Bytes that are not a valid message are the client's error,
for which gRPC itself would return UNKNOWN. Calls that wait for their clients hold places (``FairPlaces``), so that idle
clients cannot block others.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
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
    UnauthenticatedError,
)
from serving.api_keys import ApiKeys
from serving.errors import abort, address_of_peer, refusing

_OPEN_SECONDS = 5.0
# Streams that need no key, such as health watches, last until their client ends them.
_MAX_OPEN_STREAMS = 256
_MAX_WAITING = 1024
Hold = Callable[[str, int], AbstractContextManager[None]]
"""Maps (digest of a call's key, bytes of its message) to a context that is held during the call."""
_HEALTH = "/grpc.health.v1.Health/"
_Req = TypeVar("_Req")
_Res = TypeVar("_Res")
EVICTION_AGE_SECONDS = 0.25
"""Minimum time for which a place is held before it is evicted, so that its client has time to send."""


@dataclass(eq=False)
class _Place:
    """A place of one of a client's connections, held since ``since`` (the loop's clock); ``scope`` cancels its holder."""

    client: str
    connection: str
    since: float = 0.0
    scope: asyncio.Timeout | None = None


class _Shares:
    """Counts the places that are held by each client and each connection."""

    def __init__(self) -> None:
        self._by_client: Counter[str] = Counter()
        self._by_connection: Counter[str] = Counter()

    def add(self, place: _Place, number: int) -> None:
        """Add ``number`` (1 or -1) to the counts of a place's client and connection."""
        for counts, name in ((self._by_client, place.client), (self._by_connection, place.connection)):
            counts[name] += number
            if not counts[name]:
                del counts[name]

    def of(self, place: _Place) -> tuple[int, int]:
        """Return the numbers of places that the client and the connection of a place hold."""
        return self._by_client[place.client], self._by_connection[place.connection]


class FairPlaces:
    """Owns the places. A client or connection with fewer places evicts the oldest of those that hold most.

    limit: number of places. max_waiting: number of calls that may wait for one.
    """

    def __init__(self, limit: int, max_waiting: int) -> None:
        self._limit = limit
        self._max_waiting = max_waiting
        self._held: list[_Place] = []
        self._waiting: dict[_Place, asyncio.Future[None]] = {}
        self._shares = _Shares()
        self._promised: _Place | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_held(self) -> int:
        """The number of places that are held."""
        return len(self._held)

    @asynccontextmanager
    async def place(self, client: str, connection: str) -> AsyncIterator[None]:
        """Hold a place within the block. Raises OverloadedError if there is none, and in the block if it is evicted."""
        place = _Place(client, connection)
        if len(self._waiting) >= self._max_waiting:
            self._reject_one(place)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[place] = granted
        self._grant()
        try:
            await granted
        except BaseException:
            # The place may have been granted before this task was cancelled: another call gets it.
            self._waiting.pop(place, None)
            self._release(place)
            raise
        try:
            async with asyncio.timeout(None) as place.scope:
                yield
        except TimeoutError:
            if place.scope is None or not place.scope.expired():
                raise
            raise OverloadedError(
                "this call waited for its client and was ended to make room for other clients; send it again"
            ) from None
        finally:
            self._release(place)

    def _reject_one(self, newest: _Place) -> None:
        """Reject the last call of the client, or connection, with most waiting calls; ``newest`` if it has as many."""
        error = OverloadedError(f"{len(self._waiting)} calls are waiting already; send this one again later")
        clients = Counter(place.client for place in self._waiting)
        client, count = clients.most_common(1)[0]
        crowd = [place for place in self._waiting if place.client == client]
        if newest.client == client:
            connections = Counter(place.connection for place in crowd)
            connection, count = connections.most_common(1)[0]
            crowd = [place for place in crowd if place.connection == connection]
            own = connections[newest.connection]
        else:
            own = clients[newest.client]
        # Equal crowds: rejecting another call would only let the newest one take its place.
        if count <= own + 1:
            raise error
        granted = self._waiting.pop(crowd[-1])
        if not granted.done():
            granted.set_exception(error)

    def _release(self, place: _Place) -> None:
        if place in self._held:
            self._held.remove(place)
            self._shares.add(place, -1)
            self._grant()

    def _grant(self) -> None:
        """Grant free places to those that hold fewest, and evict one for the next of them."""
        while self._waiting and len(self._held) < self._limit:
            place = self._next_waiting()
            granted = self._waiting.pop(place)
            if granted.done():  # its task was cancelled and has not run yet
                continue
            granted.set_result(None)
            place.since = asyncio.get_running_loop().time()
            self._held.append(place)
            self._shares.add(place, 1)
        # One eviction at a time: its place is freed only when its holder has run.
        # The time of a scope is set when its place is evicted.
        is_evicting = any(place.scope is not None and place.scope.when() is not None for place in self._held)
        if self._waiting and not is_evicting:
            self._evict_for(self._next_waiting())

    def _next_waiting(self) -> _Place:
        """Return the call for which a place was evicted, or that of the client and connection with fewest places."""
        # Another client could otherwise take the place that was freed for this one, and the next eviction would follow.
        if self._promised in self._waiting:
            return self._promised
        return min(self._waiting, key=self._shares.of)

    def _evict_for(self, newest: _Place) -> None:
        """Evict the oldest place of the client that holds most, if that is more than ``newest``'s holds."""
        own = self._shares.of(newest)
        larger = [
            place
            for place in self._held
            for by_client, by_connection in [self._shares.of(place)]
            if (by_client > own[0] if place.client != newest.client else by_connection > own[1])
        ]
        if not larger:
            return
        loop = asyncio.get_running_loop()
        chosen = max(larger, key=lambda place: (*self._shares.of(place), -place.since))
        seconds_left = chosen.since + EVICTION_AGE_SECONDS - loop.time()
        if seconds_left <= 0 and chosen.scope is not None:
            chosen.scope.reschedule(loop.time())
            self._promised = newest
        elif self._timer is None:
            self._timer = loop.call_later(seconds_left, self._retry_eviction)

    def _retry_eviction(self) -> None:
        self._timer = None
        self._grant()


def authorization_of(metadata: "grpc.aio.Metadata | tuple[tuple[str, str | bytes], ...] | None") -> str:
    """Return the ``authorization`` of a call's metadata; empty if there is none."""
    found = dict(metadata or ()).get("authorization", "")
    return found.decode("utf-8", "surrogateescape") if isinstance(found, bytes) else found


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Rejects calls without a valid key (UNAUTHENTICATED). The health service needs none.

    on_wrong: gets the client's address of each rejected call.
    """

    def __init__(self, keys: ApiKeys, on_wrong: Callable[[str], None]) -> None:
        self._keys = keys
        self._on_wrong = on_wrong

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[_Req, _Res] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[_Req, _Res] | None":
        """Pass the call on, or answer it with UNAUTHENTICATED."""
        handler = await continuation(handler_call_details)
        if handler is None or str(handler_call_details.method).startswith(_HEALTH):
            return handler
        try:
            self._keys.check(authorization_of(handler_call_details.invocation_metadata))
        except UnauthenticatedError as error:
            return cast("grpc.RpcMethodHandler[_Req, _Res]", refusing(handler, error, self._on_wrong))
        return handler


class MessageInterceptor(grpc.aio.ServerInterceptor):
    """Reads the messages of methods with a unary request, and writes the answers of methods with a unary response.

    service: the full name of the service that needs keys, if there are any. max_reads: limit of its messages that are being
    received at once. read_seconds: time limit of each. Messages of other services (health) have their own limits.
    stall_seconds: time for which a client may read nothing of an answer. tenant: returns the digest of the key in a call's
    metadata. hold: counts the bytes of a message of the service until its call ends, or raises OverloadedError.
    on_open_call: gets the address of each client that calls another service.
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
        on_open_call: Callable[[str], None] = lambda _address: None,
    ) -> None:
        self._prefix = f"/{service}/"
        self._read_seconds = read_seconds
        self._stall_seconds = stall_seconds
        self._tenant = tenant
        self._hold = hold
        self._on_open_call = on_open_call
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
            address = address_of_peer(context.peer())
            if not is_ours:
                self._on_open_call(address)
            caller = (tenant or address, context.peer())
            async with AsyncExitStack() as held:
                try:
                    raw = await self._read(messages, caller, is_ours=is_ours)
                    if is_ours:
                        held.enter_context(self._hold(tenant, len(raw)))
                    request = _parsed(handler, raw)
                except KvbatonError as error:
                    await abort(context, error)
                    return
                # The message may have megabytes, and the call may last for minutes.
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
        seconds = self._stall_seconds
        try:
            async with asyncio.timeout(seconds):
                await context.write(response)
        except TimeoutError:
            await abort(
                context, CancelledError(f"the client has read nothing of the answer for {seconds:g} s")
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
