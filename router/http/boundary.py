"""The boundary of HTTP: errors become the error object of the path's API, and every response carries the request's id."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from contract.errors import ErrorKind, InternalError, InvalidRequestError, KvbatonError, NotFoundError
from router.http.access import tenant_of
from router.http.exchange import Origin
from router.http.messages.errors import is_messages_path, messages_error
from router.http.streaming import EventStream
from router.intake.cancellation import client_name
from router.intake.request import new_request_id
from serving.errors import http_status, openai_error, retry_after_seconds

logger = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)
STREAM = web.RequestKey("stream", EventStream)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def request_id_of(request: web.Request) -> str:
    """Return the id of the request. Requests for answers have one of their kind; others get one here."""
    if REQUEST_ID not in request:
        request[REQUEST_ID] = new_request_id("req")
    return request[REQUEST_ID]


def request_id_header(request: web.Request) -> dict[str, str]:
    """Return the headers that identify the request: its id, and in OpenAI's header its client's name for it, if any."""
    request_id = request_id_of(request)
    found = {"x-kvbaton-request-id": request_id, "X-Request-Id": name_of(request) or request_id}
    return {**found, "request-id": request_id} if is_messages_path(request) else found


def name_of(request: web.Request) -> str | None:
    """Return the name that the client gave its request in the header ``X-Request-Id``."""
    return client_name(request.headers.get("X-Request-Id"))


def origin_of(request: web.Request, arrival: float) -> Origin:
    """Return the origin of the body of ``request``."""
    return Origin(request_id=request[REQUEST_ID], tenant=tenant_of(request), arrival=arrival)


def error_object(request: web.Request, error: KvbatonError) -> dict[str, Any]:
    """Return the error object of the API that the request's path belongs to."""
    return messages_error(error, request_id_of(request)) if is_messages_path(request) else openai_error(error)


@web.middleware
async def boundary(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer errors: as a response, or as the last event of a stream whose headers were sent (without [DONE])."""
    try:
        response = await handler(request)
    except KvbatonError as error:
        response = await _error_response(request, error)
    except web.HTTPException as error:
        response = _http_error_response(request, error)
    except ConnectionResetError:
        logger.info("%s: the client disconnected", request_id_of(request))
        response = request[STREAM].response if STREAM in request else web.Response(status=499)
    except Exception:
        request_id = request_id_of(request)
        logger.exception("%s: unexpected error", request_id)
        internal = InternalError(f"an internal error; the log names it by {request_id}")
        response = await _error_response(request, internal)
    if not response.prepared:
        response.headers.update(request_id_header(request))
    return response


async def _error_response(request: web.Request, error: KvbatonError) -> web.StreamResponse:
    stream: EventStream | None = request.get(STREAM)
    if stream is not None and stream.response.prepared:
        await stream.fail(error_object(request, error))
        return stream.response
    response = web.json_response(error_object(request, error), status=http_status(error.kind))
    if (seconds := retry_after_seconds(error.kind)) is not None:
        response.headers["Retry-After"] = str(seconds)
    if error.kind is ErrorKind.UNAUTHENTICATED:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _http_error_response(request: web.Request, error: web.HTTPException) -> web.Response:
    """Answer the errors that aiohttp raises itself: unknown path, wrong method."""
    where = f"{request.method} {request.path}"
    shown: KvbatonError = InvalidRequestError(f"{where}: {error.reason}")
    if isinstance(error, web.HTTPNotFound):
        shown = NotFoundError(f"there is no {where}")
    response = web.json_response(error_object(request, shown), status=error.status)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
