"""Sends one request of a batch over HTTP, and retries it while the service is busy."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import aiohttp
import msgspec

from cli.batch_files import BatchRequest, Response
from contract.errors import UnavailableError

_BUSY = (429, 503)
_LONGEST_PAUSE_SECONDS = 60.0


class BatchClient:
    """Sends requests to the service at ``url``."""

    def __init__(self, session: aiohttp.ClientSession, url: str, max_retries: int) -> None:
        self._session = session
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        self._max_retries = max_retries

    async def send(self, request: BatchRequest) -> Response:
        """Return the service's final reply, with any status. Raises UnavailableError when it no longer answers."""
        for attempt in range(self._max_retries + 1):
            is_last = attempt == self._max_retries
            pause = min(0.5 * 2.0**attempt, _LONGEST_PAUSE_SECONDS)
            try:
                async with self._session.post(
                    f"{self._url}{request.path}", data=request.body, headers=self._headers
                ) as reply:
                    response = _response(reply, await reply.read())
                if reply.status not in _BUSY or is_last:
                    return response
                pause = retry_after_seconds(reply.headers, pause)
            except (aiohttp.ClientError, TimeoutError) as error:
                if is_last:
                    reason = str(error) or type(error).__name__
                    raise UnavailableError(f"{self._url} no longer answers: {reason}") from error
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")


def _response(reply: aiohttp.ClientResponse, raw: bytes) -> Response:
    """Return the reply with its body as one line of JSON; a body that is not JSON becomes a string."""
    try:
        body = msgspec.json.format(raw, indent=-1)
    except msgspec.DecodeError:
        body = msgspec.json.encode(raw.decode("utf-8", "replace"))
    name = reply.headers.get("x-kvbaton-request-id") or reply.headers.get("x-request-id") or ""
    return Response(reply.status, name, msgspec.Raw(body))


def retry_after_seconds(headers: Mapping[str, str], default: float) -> float:
    """Return the pause that a reply requests (RFC 9110 §10.2.3: seconds or a date), at most one minute."""
    requested = headers.get("Retry-After", "").strip()
    if requested.isdecimal():
        return min(float(requested), _LONGEST_PAUSE_SECONDS)
    try:
        until = parsedate_to_datetime(requested)
    except ValueError:
        return default
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return min(max(0.0, (until - datetime.now(UTC)).total_seconds()), _LONGEST_PAUSE_SECONDS)
