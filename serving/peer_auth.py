"""How our processes prove to each other, on every internal gRPC call, that they belong to one cluster.

The proof is an HMAC over a fixed purpose, made with the cluster secret; it travels as metadata. It keeps strangers
out of the internal ports; it does not hide traffic (TLS does).
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import grpc
import grpc.aio

from contract.errors import UnauthenticatedError
from contract.proofs import derive_key, is_proof, make_proof
from serving.grpc_errors import refusing

PROOF_KEY = "kvbaton-proof"
_PURPOSE = "internal-grpc"

Metadata = tuple[tuple[str, str], ...]
_Req = TypeVar("_Req")
_Res = TypeVar("_Res")


def peer_metadata(secret: str) -> Metadata:
    """The metadata that a caller sends with every internal call."""
    return ((PROOF_KEY, make_proof(derive_key(secret, _PURPOSE), "call")),)


class PeerAuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the cluster's proof (UNAUTHENTICATED)."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[_Req, _Res] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[_Req, _Res] | None":
        """Let the call through, or answer it with UNAUTHENTICATED in its own shape."""
        handler = await continuation(handler_call_details)
        claimed = dict(handler_call_details.invocation_metadata or ()).get(PROOF_KEY, "")
        text = claimed.decode("ascii", "replace") if isinstance(claimed, bytes) else claimed
        if handler is None or is_proof(derive_key(self._secret, _PURPOSE), text, "call"):
            return handler
        error = UnauthenticatedError("this port answers calls that carry the cluster's proof only")
        return cast("grpc.RpcMethodHandler[_Req, _Res]", refusing(handler, error))
