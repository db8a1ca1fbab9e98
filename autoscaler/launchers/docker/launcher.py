"""The launcher of workers as containers of a Compose project, on one Docker engine.

A worker's container is known by its labels, so those that Compose started and those that this launcher created look alike. A
new one is a copy of another container of its role: ``copy_of`` makes of what the engine reports of a container what creates
one, and the launcher decides which container is copied, started again, stopped or deleted.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from autoscaler.launchers.docker.engine import DockerEngine
from contract.errors import KvbatonError, NotFoundError, UnavailableError
from contract.identity import WORKER_ROLES, Role

logger = logging.getLogger(__name__)

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
_NAMES = 10
"""Names that are tried for a new container, if other containers have the first ones."""


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


def worker_of(role: Role, container: str) -> str:
    """Return the id of a container's worker, which the entrypoint makes of the role and the host name."""
    return f"{role.value}-{container[:_SHORT]}"


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


def place_of(facts: Mapping[str, Any]) -> str | None:
    """Return the place of a container's worker; None if it has none."""
    variables = dict(variable.partition("=")[::2] for variable in facts["Config"]["Env"] or ())
    return variables.get(_PLACE)


def copy_of(
    facts: Mapping[str, Any], name: str, number: int, place: str | None
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return what creates a container like another one, of the same Compose service, with this name, number and place.

    Returns the body for the engine, and the networks to connect it to afterwards, with its names there.

    Image, command, variables, volumes, devices, limits, health check and grace are the same.
    """
    # The host name is left to the engine, which takes the new id: the entrypoint makes the worker's id of it.
    config = {key: value for key, value in facts["Config"].items() if key not in ("Hostname", "MacAddress")}
    labels = {key: value for key, value in config["Labels"].items() if key != _REPLACES}
    variables = config["Env"] or []
    if place is not None:
        variables = [one for one in variables if not one.startswith(f"{_PLACE}=")] + [f"{_PLACE}={place}"]
    host = facts["HostConfig"]
    own_names = (facts["Name"].removeprefix("/"), facts["Id"][:_SHORT])
    networks = {
        network: [name, *(alias for alias in endpoint["Aliases"] or () if alias not in own_names)]
        for network, endpoint in facts["NetworkSettings"]["Networks"].items()
    }
    # Engines before API 1.44 refuse a container that is created in more than one network.
    first = host["NetworkMode"]
    endpoints = {first: {"Aliases": networks.pop(first)}} if first in networks else {}
    body = {
        **config,
        "Image": facts["Image"],  # its id: the tag of Config may be another image's meanwhile
        "Env": variables,
        "Labels": {**labels, _NUMBER: str(number)},
        "HostConfig": host,
        "NetworkingConfig": {"EndpointsConfig": endpoints},
    }
    return body, networks


class DockerLauncher:
    """Starts and removes the workers' containers of a Compose project. The engine's list is all that it remembers.

    So the containers that Compose started, and those of a launcher before this one, are its own. A new container is a copy
    of the newest one of its role; the last one of a role is therefore stopped, and not deleted. A stopped container is
    started before another one is created.
    """

    def __init__(self, engine: DockerEngine, project: str) -> None:
        self._engine = engine
        self._project = project
        # Containers that are being stopped still run for their grace: without this set the next decision would count them.
        self._leaving: set[str] = set()

    async def names(self) -> Sequence[tuple[str, Role]]:
        """Return the workers whose containers run and are not being stopped."""
        return [
            (container.worker, container.role)
            for container in await self._containers()
            if container.runs and container.id not in self._leaving
        ]

    async def add(self, role: Role) -> str:
        """Start a container, and return the id that its worker will have.

        Raises NotFoundError and UnavailableError: there is no container to copy or no free place, or the engine's reason.
        """
        containers = await self._containers()
        for stopped in containers:
            if stopped.role is role and stopped.is_stopped and stopped.id not in self._leaving:
                if await self._start_again(stopped, containers):
                    return stopped.worker
                containers = [each for each in containers if each is not stopped]
        of_role = [each for each in containers if each.role is role and (each.runs or each.is_stopped)]
        if not of_role:
            raise UnavailableError(
                f"project {self._project} has no container of a {role.value} worker that could be copied: run"
                " `docker compose up -d`"
            )
        return await self._copy(max(of_role, key=lambda each: each.created), containers)

    async def remove(self, name: str) -> None:
        """Stop the container of a worker, and delete it unless it is the last one of its role."""
        container = next((each for each in await self._containers() if each.worker == name), None)
        if container is None or container.id in self._leaving:
            return
        self._leaving.add(container.id)
        try:
            grace = (await self._engine.inspect(container.id))["Config"].get("StopTimeout")
            # Docker's default is 10 s.
            await self._engine.stop(container.id, 10.0 if grace is None else float(grace))
            others = (each for each in await self._containers() if each.id != container.id)
            if any(each.role is container.role for each in others):
                await self._engine.delete(container.id)
        except NotFoundError:
            pass  # it was deleted by another client of the engine
        finally:
            self._leaving.discard(container.id)

    async def _containers(self) -> list[Container]:
        # A container of `docker compose run` has the same labels, but Compose does not keep it: it is not counted.
        labels = [f"{_PROJECT}={self._project}", f"{_ONE_OFF}=False", ROLE_LABEL]
        return listed(await self._engine.containers(labels))

    async def _start_again(self, stopped: Container, containers: Sequence[Container]) -> bool:
        """Start a stopped container again. Returns False if it cannot start and was deleted: there are others to copy.

        Raises the engine's error if it is the last one of its role.
        """
        try:
            await self._engine.start(stopped.id)
        except KvbatonError as error:
            if not any(each.role is stopped.role and each is not stopped for each in containers):
                raise
            logger.warning("the stopped container of %s is replaced: %s", stopped.worker, error.message)
            await self._engine.delete(stopped.id)
            return False
        return True

    async def _copy(self, template: Container, containers: Sequence[Container]) -> str:
        """Create and start a container like another one; return the id of its worker."""
        facts = await self._engine.inspect(template.id)
        place = await self._free_place(template, containers)
        first = 1 + max(each.number for each in containers if each.service == template.service)
        for number in range(first, first + _NAMES):
            name = f"{self._project}-{template.service}-{number}"
            body, networks = copy_of(facts, name, number, place)
            new = await self._engine.create(name, body)
            if new is None:
                continue
            try:
                for network, aliases in networks.items():
                    await self._engine.connect(network, new, aliases)
                await self._engine.start(new)
            except KvbatonError:
                # Left there, it would hold its GPU place, and the next order would try to start it again.
                with suppress(KvbatonError):
                    await self._engine.delete(new)
                raise
            return worker_of(template.role, new)
        raise UnavailableError(
            f"other containers have the names {self._project}-{template.service}-{first} to {first + _NAMES - 1}"
        )

    async def _free_place(self, template: Container, containers: Sequence[Container]) -> str | None:
        """Return the first place of the role's list that no container has; None if its workers need none.

        Raises UnavailableError if all are taken.
        """
        if template.places is None:
            return None
        taken = set()
        for container in containers:  # stopped ones too: they are started again, with their places
            with suppress(NotFoundError):
                taken.add(place_of(await self._engine.inspect(container.id)))
        for place in template.places:
            if place not in taken:
                return place
        raise UnavailableError(
            f"all GPU places of {template.role.value} workers ({','.join(template.places)}) are taken"
        )
