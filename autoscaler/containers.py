"""The containers of a Compose project in which workers run, and the copy of one. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.identity import WORKER_ROLES, Role

ROLE_LABEL = "kvbaton.role"
"""The role in which the worker of a container starts."""
PLACES_LABEL = "kvbaton.places"
"""The places, with commas between them, that the workers of a role may take on the machine's GPUs; none on the CPU."""
_PLACE = "GPU_PLACE"
"""The variable that gives a worker its place."""
_PROJECT = "com.docker.compose.project"
_SERVICE = "com.docker.compose.service"
_NUMBER = "com.docker.compose.container-number"
_ONE_OFF = "com.docker.compose.oneoff"
_REPLACES = "com.docker.compose.replace"
_SHORT = 12
"""Characters of a container's id that are its host name."""


@dataclass(frozen=True, kw_only=True)
class Container:
    """A worker's container. number: its number within ``service``. created: seconds. state: Docker's word."""

    id: str
    role: Role
    service: str
    number: int
    created: float
    state: str
    labels: Mapping[str, str]

    @property
    def worker(self) -> str:
        """The id of its worker."""
        return worker_of(self.role, self.id)

    @property
    def runs(self) -> bool:
        """True if it runs, or will run again without an order."""
        return self.state in ("running", "restarting", "paused")

    @property
    def is_stopped(self) -> bool:
        """True if it can be started."""
        return self.state in ("created", "exited")

    @property
    def places(self) -> list[str] | None:
        """The places that the workers of this role may take; None if they need none."""
        text = self.labels.get(PLACES_LABEL)
        return None if text is None else text.split(",")


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A container to create. body: for the engine. networks: those to connect it to afterwards, with its names there."""

    body: dict[str, Any]
    networks: dict[str, list[str]]


def worker_of(role: Role, container: str) -> str:
    """Return the id of a container's worker, which the entrypoint makes of the role and the host name."""
    return f"{role.value}-{container[:_SHORT]}"


def filters_of(project: str) -> list[str]:
    """Return the labels that all workers' containers of a Compose project have, and no others."""
    return [f"{_PROJECT}={project}", f"{_ONE_OFF}=False", ROLE_LABEL]


def listed(entries: Sequence[Mapping[str, Any]]) -> list[Container]:
    """Return the containers of the engine's list. Those that are not a worker's, or not made by Compose, are left out."""
    roles = {role.value: role for role in WORKER_ROLES}
    return [
        Container(
            id=entry["Id"],
            role=roles[labels[ROLE_LABEL]],
            service=labels[_SERVICE],
            number=int(labels[_NUMBER]),
            created=entry["Created"],
            state=entry["State"],
            labels=labels,
        )
        for entry in entries
        if (labels := entry["Labels"])[ROLE_LABEL] in roles
        and _SERVICE in labels
        and labels.get(_NUMBER, "").isdecimal()
    ]


def grace_of(facts: Mapping[str, Any]) -> float:
    """Return the seconds that a container has after its stop signal. facts: see ``DockerEngine.inspect``."""
    seconds = facts["Config"].get("StopTimeout")
    return 10.0 if seconds is None else float(seconds)


def place_of(facts: Mapping[str, Any]) -> str | None:
    """Return the place of a container's worker; None if it has none."""
    variables = dict(variable.partition("=")[::2] for variable in facts["Config"]["Env"] or ())
    return variables.get(_PLACE)


def copy_of(facts: Mapping[str, Any], name: str, number: int, place: str | None) -> Copy:
    """Return what creates a container like another one, of the same Compose service, with this name, number and place.

    Image, command, variables, volumes, devices, limits, health check and grace are the same. The image is that of the other
    container even if its tag is another's meanwhile. The host name is left to the engine, and with it the worker's id.
    """
    config = {key: value for key, value in facts["Config"].items() if key not in ("Hostname", "MacAddress")}
    labels = {key: value for key, value in config["Labels"].items() if key != _REPLACES}
    host = facts["HostConfig"]
    own_names = (facts["Name"].removeprefix("/"), facts["Id"][:_SHORT])
    networks = {
        network: [name, *(alias for alias in endpoint["Aliases"] or () if alias not in own_names)]
        for network, endpoint in facts["NetworkSettings"]["Networks"].items()
    }
    first = host["NetworkMode"]
    endpoints = {first: {"Aliases": networks.pop(first)}} if first in networks else {}
    body = {
        **config,
        "Image": facts["Image"],
        "Env": _with_place(config["Env"] or [], place),
        "Labels": {**labels, _NUMBER: str(number)},
        "HostConfig": host,
        "NetworkingConfig": {"EndpointsConfig": endpoints},
    }
    return Copy(body=body, networks=networks)


def _with_place(variables: Sequence[str], place: str | None) -> list[str]:
    if place is None:
        return list(variables)
    return [*(one for one in variables if not one.startswith(f"{_PLACE}=")), f"{_PLACE}={place}"]
