"""The boundary of HTTP: what every request has, whatever its path is.

Errors become the error object of the path's API (OpenAI's, or Anthropic's below /v1/messages), and every response carries
the request's id. Inside the boundary each request can be ended, by its client or when the router stops, and releases at its
end what it holds.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from contract.errors import ErrorKind, InternalError, InvalidRequestError, KvbatonError, NotFoundError
from router.http.access import tenant_of
from router.http.exchange import Origin
from router.http.streaming import EventStream
from router.intake.cancellation import CancellableRequests, OpenRequest, client_name
from router.intake.request import new_request_id
from serving.admin_access import authorization_of
from serving.errors import http_status, openai_error, retry_after_seconds

logger = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)
STREAM = web.RequestKey("stream", EventStream)
OPEN = web.RequestKey("open", OpenRequest)
"""The block of a request that is being answered: it can be ended, and holds resources until its end."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_MESSAGES = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "api_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_messages_path(request: web.Request) -> bool:
    """Return True for a request to Anthropic's API."""
    return request.path == _MESSAGES or request.path.startswith(f"{_MESSAGES}/")


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
    if not is_messages_path(request):
        return openai_error(error)
    # Anthropic's form has no field for ``param``
    shown = {"type": _TYPES[http_status(error.kind)], "message": error.message}
    return {"type": "error", "error": shown, "request_id": request_id_of(request)}


def boundary(running: CancellableRequests) -> Middleware:
    """Return the middleware of the boundary. ``running`` can end every request within, whatever it waits for.

    An error is answered as a response, or as the last event of a stream whose headers were sent (without [DONE]).
    """

    @web.middleware
    async def answer(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            with running.open() as request[OPEN]:
                response = await handler(request)
        except KvbatonError as error:
            response = await _error_response(request, error)
        except web.HTTPException as error:
            response = _http_error_response(request, error)
        except ConnectionResetError:
            logger.info("%s: the client disconnected", request_id_of(request))
            # no client receives it, but aiohttp needs the response that has begun
            response = request[STREAM].response if STREAM in request else web.Response(status=499)
        except Exception:
            request_id = request_id_of(request)
            logger.exception("%s: unexpected error", request_id)
            internal = InternalError(f"an internal error; the log names it by {request_id}")
            response = await _error_response(request, internal)
        # a response that was sent in part had these headers from its beginning
        if not response.prepared:
            response.headers.update(request_id_header(request))
        return response

    return answer


def _http_error_response(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    """Return the response for an error that aiohttp raises itself: for an unknown path, or a wrong method."""
    where = f"{request.method} {request.path}"
    shown: KvbatonError = InvalidRequestError(f"{where}: {error.reason}")
    if isinstance(error, web.HTTPNotFound):
        shown = NotFoundError(f"there is no {where}")
    response = web.json_response(error_object(request, shown), status=error.status)
    # HTTP demands it with status 405
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


async def _error_response(request: web.Request, error: KvbatonError) -> web.StreamResponse:
    stream: EventStream | None = request.get(STREAM)
    # the status was sent, so the error can only be the last event
    if stream is not None and stream.response.prepared:
        await stream.fail(error_object(request, error))
        return stream.response
    response = web.json_response(error_object(request, error), status=http_status(error.kind))
    if (seconds := retry_after_seconds(error.kind)) is not None:
        response.headers["Retry-After"] = str(seconds)
    if error.kind is ErrorKind.UNAUTHENTICATED:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def let_client_cancel(request: web.Request) -> None:
    """Let the client cancel the request from now on, by its id or by the client's own name for it."""
    request[OPEN].add_names(authorization_of(request), request[REQUEST_ID], name_of(request))
