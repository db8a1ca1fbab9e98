"""A call of the public gRPC API: its id, its client, and the boundary at which errors become statuses."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from contract.errors import InternalError, InvalidRequestError, KvbatonError
from protos import inference_pb2 as pb
from router.intake.cancellation import client_name
from router.intake.request import new_request_id
from serving.grpc_errors import abort

logger = logging.getLogger(__name__)

REQUEST_ID_KEY = "x-kvbaton-request-id"
"""Initial metadata: the router's id of a request."""
_NAME_KEY = "x-request-id"


@asynccontextmanager
async def answering(context: Any, id_prefix: str) -> AsyncIterator[str]:
    """Yield a new id for the call, and end the call with the status of an error that is raised within the block."""
    request_id = new_request_id(id_prefix)
    try:
        yield request_id
    except KvbatonError as error:
        await abort(context, error, request_id)
    except Exception:
        logger.exception("%s: unexpected error", request_id)
        internal = InternalError(f"an internal error; the log names it by {request_id}")
        await abort(context, internal, request_id)


def name_of(request: pb.GenerateRequest | pb.EmbedRequest, metadata: Any) -> str | None:
    """Return the client's name for its request. Raises InvalidRequestError for a ``request_id`` that is not a valid name."""
    if not request.request_id:
        given = dict(metadata or ()).get(_NAME_KEY)
        return client_name(given if isinstance(given, str) else None)
    if not client_name(request.request_id):
        raise InvalidRequestError(
            "request_id must be 1 to 64 printable ASCII characters without spaces", param="request_id"
        )
    return request.request_id
