"""API keys on a public gRPC port: metadata ``authorization: Bearer KEY``."""

from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import grpc
import grpc.aio

from contract.errors import UnauthenticatedError
from serving.api_keys import ApiKeys
from serving.grpc_errors import refusing
from serving.wrong_keys import WrongKeys

_HEALTH = "/grpc.health.v1.Health/"
_Req = TypeVar("_Req")
_Res = TypeVar("_Res")


def authorization_of(metadata: "grpc.aio.Metadata | tuple[tuple[str, str | bytes], ...] | None") -> str:
    """Return the ``authorization`` of a call's metadata; empty if there is none."""
    found = dict(metadata or ()).get("authorization", "")
    return found.decode("utf-8", "surrogateescape") if isinstance(found, bytes) else found


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Rejects calls without a valid key (UNAUTHENTICATED). The health service needs none."""

    def __init__(self, keys: ApiKeys, wrong: WrongKeys) -> None:
        self._keys = keys
        self._wrong = wrong

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
            return cast("grpc.RpcMethodHandler[_Req, _Res]", refusing(handler, error, self._wrong.note))
        return handler
