"""Sends requests to the admin API of a router."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from contract.errors import (
    KvbatonError,
    NotFoundError,
    SettingError,
    UnauthenticatedError,
    UnavailableError,
)
from contract.identity import Role
from launch.operator_settings import OperatorSettings

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
_KEY_HINT = "give an admin key of the router as KVBATON_ADMIN_KEY or --admin-key"


class RouterAdmin:
    """The admin API at one address. Made by ``open_admin``."""

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

    async def _request(
        self, method: str, path: str, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        url = f"http://{self.address}{path}"
        timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.request(method, url, params=query, timeout=timeout) as response:
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


@asynccontextmanager
async def open_admin(settings: OperatorSettings) -> AsyncIterator[RouterAdmin]:
    """Open the admin API that the settings name. Raises SettingError if they name none."""
    address = _address(settings)
    headers = {"Authorization": f"Bearer {settings.admin_key}"} if settings.admin_key else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        yield RouterAdmin(address, session)


def _address(settings: OperatorSettings) -> str:
    if settings.admin:
        return settings.admin
    if settings.ready_file is None:
        raise SettingError(
            "no router is named: give the address of its admin port (--admin HOST:PORT), or the ready file of"
            " `kvbaton up` (--ready-file FILE)",
            param="admin",
        )
    return _address_in(settings.ready_file)


def _address_in(ready_file: Path) -> str:
    """Return the admin address of the first router in a ready file."""
    try:
        processes = json.loads(ready_file.read_text())["processes"]
        routers = [process["admin"] for process in processes if process["role"] == Role.ROUTER.value]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SettingError(
            f"ready_file {ready_file} cannot be used: {error}; is `kvbaton up` running?", param="ready_file"
        ) from error
    if not routers:
        raise SettingError(f"ready_file {ready_file} names no running router", param="ready_file")
    return str(routers[0])


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
    is_ours = isinstance(reply, dict) and any(name in reply for name in ("workers", "id", "error"))
    return reply if is_ours else None


def _message(reply: dict[str, Any]) -> str:
    error = reply.get("error")
    return str(error["message"]) if isinstance(error, dict) and "message" in error else "an unknown error"
