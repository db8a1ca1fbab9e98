"""Sends requests to the admin port of a router."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from contract.errors import KvbatonError, NotFoundError, UnauthenticatedError, UnavailableError
from contract.scaling import ScalingLease, ScalingReport

_TIMEOUT = aiohttp.ClientTimeout(total=10.0, sock_connect=5.0)
_LEASE_TIMEOUT = aiohttp.ClientTimeout(total=3.0)
"""A frozen router must not hold up the decision about the others for longer."""
_KEY_HINT = "give an admin key of the router as KVBATON_ADMIN_KEY or --admin-key"


def admin_session(key: str | None) -> aiohttp.ClientSession:
    """Return a session for ``RouterAdmin`` that sends this admin key; None: the routers have no keys."""
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"} if key else None)


class RouterAdmin:
    """The admin API of the router at ``address``. session: see ``admin_session``."""

    def __init__(self, address: str, session: aiohttp.ClientSession) -> None:
        self.address = address
        self._session = session

    async def pool(self) -> dict[str, Any]:
        """Return the router's list of workers, with its own figures.

        Raises UnavailableError if no router answers there, UnauthenticatedError for a wrong or missing key, KvbatonError
        with the router's message for another error.
        """
        return await self._request("GET", "/admin/workers")

    async def order(self, worker: str, verb: str, **query: float | str | None) -> dict[str, Any]:
        """Let a worker ``drain``, ``undrain`` or ``flip``; return its entry of the list, once the router answers.

        query: ``deadline`` (seconds), ``role``. Raises NotFoundError for a worker that is not attached, and what
        ``pool`` raises.
        """
        given = {
            name: value if isinstance(value, str) else f"{value:g}"
            for name, value in query.items()
            if value is not None
        }
        path = f"/admin/workers/{quote(worker, safe='')}/{verb}"
        return await self._request("POST", path, given)

    async def report_scaling(self, report: ScalingReport) -> None:
        """Send a decision of the autoscaler, which the router publishes. Raises what ``pool`` raises."""
        await self._request("PUT", "/admin/scaling", body=msgspec.json.encode(report))

    async def lease_scaling(self, lease: ScalingLease) -> ScalingLease:
        """Ask for the right to scale the service, or give it back; return who has it. Raises what ``pool`` raises."""
        path = "/admin/scaling/lease"
        reply = await self._request("PUT", path, body=msgspec.json.encode(lease), limit=_LEASE_TIMEOUT)
        try:
            return msgspec.convert(reply, ScalingLease)
        except msgspec.ValidationError as error:
            raise UnavailableError(f"router {self.address} answers PUT {path} with {reply}") from error

    async def metrics(self) -> str:
        """Return the router's metrics in Prometheus' text format. Raises UnavailableError if it does not answer."""
        url = f"http://{self.address}/metrics"
        try:
            async with self._session.get(url, timeout=_TIMEOUT) as response:
                text = await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"no router answers at {self.address}: {_reason(error)}") from error
        if response.status != 200:
            raise UnavailableError(f"{url} answers with status {response.status}")
        return text

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        limit: aiohttp.ClientTimeout = _TIMEOUT,
    ) -> dict[str, Any]:
        url = f"http://{self.address}{path}"
        try:
            async with self._session.request(method, url, params=query, data=body, timeout=limit) as response:
                status = response.status
                reply = _parsed(await response.text(errors="replace"))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"no router answers at {self.address}: {_reason(error)}") from error
        if reply is None:
            raise UnavailableError(
                f"{self.address} is not the admin port of a router: it answers {method} {path} with status {status}"
            )
        if status in (200, 202):
            return reply
        message = f"router {self.address}: {_message(reply)}"
        if status == 401:
            raise UnauthenticatedError(f"{message}; {_KEY_HINT}")
        if status == 404:
            raise NotFoundError(message)
        raise KvbatonError(message)


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.strerror:
        return error.os_error.strerror
    return str(error) or type(error).__name__


def _parsed(text: str) -> dict[str, Any] | None:
    """Return a JSON object of the admin API; None for another answer."""
    try:
        reply = json.loads(text)
    except ValueError:
        return None
    is_ours = isinstance(reply, dict) and any(
        name in reply for name in ("workers", "id", "pools", "holder", "error")
    )
    return reply if is_ours else None


def _message(reply: dict[str, Any]) -> str:
    error = reply.get("error")
    return str(error["message"]) if isinstance(error, dict) and "message" in error else "an unknown error"
