"""The calls of the Docker Engine API that the launcher of containers needs, over the engine's Unix socket.

Docker describes them as API 1.41 (engine 20.10) and later. The newest version that the engine has is used: a container
is created from what the same version has reported of another one.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from contract.errors import KvbatonError, NotFoundError, UnavailableError

_SECONDS = 60.0
"""Time limit of a call that does not wait for a container."""
_STOPS_AT_ONCE = 30.0
"""Time that the engine has for what it does after the grace of a container that does not stop."""


class DockerEngine:
    """An engine, through ``session``. version: the prefix of all paths, as "/v1.41".

    Each method raises UnavailableError if the engine does not answer or cannot do it, and NotFoundError for an unknown
    container, image or network.
    """

    def __init__(self, socket: Path, session: aiohttp.ClientSession, version: str = "") -> None:
        self._socket = socket
        self._session = session
        self._version = version

    async def newest_version(self) -> str:
        """Return the prefix of the paths of the newest API that the engine has."""
        _, headers, _ = await self._send("GET", "/_ping")
        return f"/v{headers['Api-Version']}"

    async def containers(self, labels: Sequence[str]) -> list[dict[str, Any]]:
        """Return the list's facts about the containers with all of these labels ("name" or "name=value"), in any state."""
        query = {"all": "true", "filters": json.dumps({"label": list(labels)})}
        found: list[dict[str, Any]] = await self._request("GET", "/containers/json", query)
        return found

    async def inspect(self, container: str) -> dict[str, Any]:
        """Return all facts about a container."""
        facts: dict[str, Any] = await self._request("GET", f"/containers/{_quoted(container)}/json")
        return facts

    async def create(self, name: str, body: Mapping[str, Any]) -> str | None:
        """Create a container and return its id; None if another container has the name."""
        status, _, reply = await self._send(
            "POST", f"{self._version}/containers/create", {"name": name}, body
        )
        if status == 409:  # the engine reports nothing else by this status here
            return None
        self._check(status, reply)
        return str(reply["Id"])

    async def connect(self, network: str, container: str, aliases: Sequence[str]) -> None:
        """Connect a container that is not running to a further network."""
        body = {"Container": container, "EndpointConfig": {"Aliases": list(aliases)}}
        await self._request("POST", f"/networks/{_quoted(network)}/connect", body=body)

    async def start(self, container: str) -> None:
        """Start a container. Nothing happens if it runs."""
        await self._request("POST", f"/containers/{_quoted(container)}/start")

    async def stop(self, container: str, grace_seconds: float) -> None:
        """Send a container its stop signal, and kill it after its own grace; return when it has ended.

        grace_seconds: that grace, for which the answer is awaited.
        """
        seconds = grace_seconds + _STOPS_AT_ONCE
        await self._request("POST", f"/containers/{_quoted(container)}/stop", seconds=seconds)

    async def delete(self, container: str) -> None:
        """Delete a container that is not running, and the volumes that have no name."""
        await self._request("DELETE", f"/containers/{_quoted(container)}", {"v": "true"})

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        seconds: float = _SECONDS,
    ) -> Any:
        status, _, reply = await self._send(method, f"{self._version}{path}", query, body, seconds)
        self._check(status, reply)
        return reply

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        seconds: float = _SECONDS,
    ) -> tuple[int, Mapping[str, str], Any]:
        """Return status, headers and content of the answer; the content is None if it is no JSON."""
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            # The host name is not resolved: the session's connector opens the Unix socket for every address.
            async with self._session.request(
                method, f"http://docker{path}", params=query, json=body, timeout=timeout
            ) as response:
                text = await response.text(errors="replace")
                with suppress(ValueError):
                    return response.status, response.headers, json.loads(text)
                return response.status, response.headers, None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.strerror:
                # The text of aiohttp names the host of the path, which does not exist.
                reason = error.os_error.strerror
            raise UnavailableError(f"no Docker engine answers at {self._socket}: {reason}") from error

    def _check(self, status: int, reply: Any) -> None:
        """Raise the error that an answer reports. 304: the container was in that state already."""
        if status < 300 or status == 304:
            return
        text = reply.get("message") if isinstance(reply, dict) else None
        message = f"Docker: {text or f'status {status}'}"
        raise NotFoundError(message) if status == 404 else UnavailableError(message)


@asynccontextmanager
async def open_engine(socket: Path) -> AsyncIterator[DockerEngine]:
    """Connect to the engine behind a Unix socket. Raises UnavailableError if none answers there."""
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(socket))) as session:
        try:
            version = await DockerEngine(socket, session).newest_version()
        except (KeyError, KvbatonError) as error:
            reason = error.message if isinstance(error, KvbatonError) else f"{socket} is no Docker engine's"
            raise UnavailableError(
                f"{reason}; docker_socket must be the engine's socket, and this user's groups must be able to use it"
                " (in Compose: DOCKER_SOCKET, DOCKER_GID)",
                param="docker_socket",
            ) from error
        yield DockerEngine(socket, session, version)


def _quoted(name: str) -> str:
    return quote(name, safe="")
