"""A Docker engine that is played behind a real Unix socket: what the launcher asks, answered as engine 20.10 does."""

import asyncio
import copy
import json
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import web

Facts = dict[str, Any]
IMAGE = "sha256:11545d302fee"
PROJECT = "shop"
_HOST_CONFIG = {
    "Binds": ["/models/llama:/models/llama:ro"],
    "NetworkMode": "shop_default",
    "RestartPolicy": {"Name": "unless-stopped", "MaximumRetryCount": 0},
    "CapDrop": ["ALL"],
    "ReadonlyRootfs": True,
    "SecurityOpt": ["no-new-privileges:true"],
    "Tmpfs": {"/tmp": ""},
    "PidMode": "container:owner",
    "IpcMode": "container:owner",
    "Init": True,
    "DeviceRequests": [{"Driver": "nvidia", "Count": -1, "Capabilities": [["gpu"]]}],
    "Mounts": [
        {"Type": "volume", "Source": "shop_secret", "Target": "/run/kvbaton/secret", "ReadOnly": True}
    ],
}


def labels(role: str, service: str, number: int, places: str | None) -> dict[str, str]:
    """Return the labels that Compose gives a worker's container, and those of the file."""
    given = {
        "com.docker.compose.project": PROJECT,
        "com.docker.compose.service": service,
        "com.docker.compose.container-number": str(number),
        "com.docker.compose.oneoff": "False",
        "com.docker.compose.config-hash": "5c6b090628a7",
        "kvbaton.role": role,
    }
    return given if places is None else {**given, "kvbaton.places": places}


class PlayedEngine:
    """Owns containers by id. calls: what was asked, as "POST start NAME". images: those that there are.

    broken: names of containers that cannot start. is_held: containers that are being stopped do not end before ``let_end``;
    ``stops``: one is being stopped.
    """

    def __init__(self) -> None:
        self.containers: dict[str, Facts] = {}
        self.calls: list[str] = []
        self.images = {IMAGE}
        self.broken: set[str] = set()
        self.is_held = False
        self.stops = asyncio.Event()
        self.let_end = asyncio.Event()
        self._ids = (f"{number:012x}".ljust(64, "f") for number in count(0xA0))
        self._times = count(1_700_000_000)

    def has(
        self, role: str, number: int = 1, *, place: int | None = None, places: str | None = None
    ) -> Facts:
        """Add a container that Compose has started, and return its facts. place, places: of a worker on GPUs."""
        service = role if places is None else f"{role}-gpu"
        config = {
            "Env": ["KVBATON_ROUTER=router:9100", *([] if place is None else [f"GPU_PLACE={place}"])],
            "Cmd": [role],
            "Image": "kvbaton-worker:cpu",
            "Entrypoint": ["sh", "-c", 'exec kvbaton "$@"', "worker"],
            "Labels": labels(role, service, number, places),
            "Healthcheck": {"Test": ["CMD", "is-healthy", "9101"]},
            "StopTimeout": 45,
        }
        body = {
            **config,
            "HostConfig": copy.deepcopy(_HOST_CONFIG),
            "NetworkingConfig": {"EndpointsConfig": {"shop_default": {"Aliases": [service, "workers"]}}},
        }
        facts = self._made(f"{PROJECT}-{service}-{number}", body)
        facts["State"]["Status"] = "running"
        return facts

    def named(self, name: str) -> Facts:
        """Return the facts of a container."""
        [found] = [facts for facts in self.containers.values() if facts["Name"] == f"/{name}"]
        return found

    def states(self) -> dict[str, str]:
        """Return the states of all containers by name."""
        return {facts["Name"][1:]: facts["State"]["Status"] for facts in self.containers.values()}

    def changes(self) -> list[str]:
        """Return the calls that have changed something."""
        return [call for call in self.calls if not call.startswith("GET")]

    def _made(self, name: str, body: Facts) -> Facts:
        identity = next(self._ids)
        config = {key: value for key, value in body.items() if key not in ("HostConfig", "NetworkingConfig")}
        networks = {
            network: {"Aliases": [*endpoint["Aliases"], identity[:12]], "IPAddress": "172.31.0.9"}
            for network, endpoint in body["NetworkingConfig"]["EndpointsConfig"].items()
        }
        self.containers[identity] = {
            "Id": identity,
            "Created": next(self._times),
            "Name": f"/{name}",
            "Image": IMAGE,
            "State": {"Status": "created"},
            "Config": {**config, "Hostname": body.get("Hostname", identity[:12])},
            "HostConfig": body["HostConfig"],
            "NetworkSettings": {"Networks": networks},
        }
        return self.containers[identity]

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one call."""
        if request.path == "/_ping":
            return web.Response(text="OK", headers={"Api-Version": "1.41"})
        version, _, rest = request.path[1:].partition("/")
        assert version == "v1.41"
        path = rest.removeprefix("containers/")
        if path == "json":
            return web.json_response(list(self._listed(json.loads(request.query["filters"])["label"])))
        if path == "create":
            return self._create(request.query["name"], await request.json())
        identity, _, verb = path.partition("/")
        if rest.startswith("networks/"):
            body = await request.json()
            facts = self.containers[body["Container"]]
            network = rest.split("/")[1]
            facts["NetworkSettings"]["Networks"][network] = body["EndpointConfig"]
            return web.json_response({})
        if identity not in self.containers:
            return refusal(404, f"No such container: {identity}")
        return await self._about(request.method, verb, self.containers[identity])

    def _listed(self, wanted: Iterable[str]) -> Iterable[Facts]:
        for facts in self.containers.values():
            known = facts["Config"]["Labels"]
            pairs = (one.partition("=") for one in wanted)
            if all(name in known and (not equals or known[name] == value) for name, equals, value in pairs):
                yield {
                    "Id": facts["Id"],
                    "Created": facts["Created"],
                    "State": facts["State"]["Status"],
                    "Labels": known,
                }

    def _create(self, name: str, body: Facts) -> web.Response:
        self.calls.append(f"POST create {name}")
        if any(facts["Name"] == f"/{name}" for facts in self.containers.values()):
            return refusal(409, f'Conflict. The container name "/{name}" is already in use')
        if body["Image"] not in self.images:
            return refusal(404, f"No such image: {body['Image']}")
        if len(body["NetworkingConfig"]["EndpointsConfig"]) > 1:
            return refusal(400, "Container cannot be connected to network endpoints")
        return web.json_response({"Id": self._made(name, body)["Id"], "Warnings": []}, status=201)

    async def _about(self, method: str, verb: str, facts: Facts) -> web.Response:
        name = facts["Name"][1:]
        if method == "GET":
            assert verb == "json"
            return web.json_response(facts)
        self.calls.append(re.sub(" +", " ", f"{method} {verb} {name}"))
        state = facts["State"]
        match method, verb:
            case "POST", "start":
                if name in self.broken:
                    return refusal(500, 'could not select device driver "nvidia"')
                state["Status"] = "running"
            case "POST", "stop":
                self.stops.set()
                if self.is_held:
                    await self.let_end.wait()
                state["Status"] = "exited"
            case "DELETE", "":
                if state["Status"] == "running":
                    return refusal(409, "You cannot remove a running container")
                del self.containers[facts["Id"]]
        return web.Response(status=204)


def refusal(status: int, message: str) -> web.Response:
    return web.json_response({"message": message}, status=status)


@asynccontextmanager
async def playing(engine: PlayedEngine, folder: Path) -> AsyncIterator[Path]:
    """Let an engine answer at a Unix socket in a folder; yield its path."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    path = folder / "docker.sock"
    await web.UnixSite(runner, str(path)).start()
    try:
        yield path
    finally:
        await runner.cleanup()
        path.unlink(missing_ok=True)
