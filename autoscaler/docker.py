"""Workers as containers of a Compose project, on one Docker engine."""

import logging
from collections.abc import Sequence
from contextlib import suppress

from autoscaler.containers import Container, Copy, copy_of, filters_of, grace_of, listed, place_of, worker_of
from autoscaler.docker_engine import DockerEngine
from contract.errors import KvbatonError, NotFoundError, UnavailableError
from contract.identity import Role

logger = logging.getLogger(__name__)

_NAMES = 10
"""Names that are tried for a new container, if other containers have the first ones."""


class DockerLauncher:
    """Starts and removes the workers' containers of a Compose project. The engine's list is all that it remembers.

    So the containers that Compose started, and those of a launcher before this one, are its own. A new container is a copy
    of the newest one of its role; the last one of a role is therefore stopped, and not deleted. A stopped container is
    started before another one is created.
    """

    def __init__(self, engine: DockerEngine, project: str) -> None:
        self._engine = engine
        self._project = project
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
                if await self._started(stopped, containers):
                    return stopped.worker
                containers = [each for each in containers if each is not stopped]
        of_role = [each for each in containers if each.role is role and (each.runs or each.is_stopped)]
        if not of_role:
            raise UnavailableError(
                f"project {self._project} has no container of a {role.value} worker that could be copied: run"
                " `docker compose up -d`"
            )
        return await self._copied(max(of_role, key=lambda each: each.created), containers)

    async def remove(self, name: str) -> None:
        """Stop the container of a worker, and delete it unless it is the last one of its role."""
        container = next((each for each in await self._containers() if each.worker == name), None)
        if container is None or container.id in self._leaving:
            return
        self._leaving.add(container.id)
        try:
            grace = grace_of(await self._engine.inspect(container.id))
            await self._engine.stop(container.id, grace)
            others = (each for each in await self._containers() if each.id != container.id)
            if any(each.role is container.role for each in others):
                await self._engine.delete(container.id)
        except NotFoundError:
            pass  # it was deleted by another client of the engine
        finally:
            self._leaving.discard(container.id)

    async def _containers(self) -> list[Container]:
        return listed(await self._engine.containers(filters_of(self._project)))

    async def _started(self, stopped: Container, containers: Sequence[Container]) -> bool:
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

    async def _copied(self, template: Container, containers: Sequence[Container]) -> str:
        """Create and start a container like another one; return the id of its worker."""
        facts = await self._engine.inspect(template.id)
        place = await self._free_place(template, containers)
        first = 1 + max(each.number for each in containers if each.service == template.service)
        for number in range(first, first + _NAMES):
            name = f"{self._project}-{template.service}-{number}"
            copy = copy_of(facts, name, number, place)
            if (new := await self._engine.create(name, copy.body)) is not None:
                await self._start_new(new, copy)
                return worker_of(template.role, new)
        raise UnavailableError(
            f"other containers have the names {self._project}-{template.service}-{first} to {first + _NAMES - 1}"
        )

    async def _start_new(self, container: str, copy: Copy) -> None:
        """Start a container that was just created, and delete it if it cannot start."""
        try:
            for network, aliases in copy.networks.items():
                await self._engine.connect(network, container, aliases)
            await self._engine.start(container)
        except KvbatonError:
            with suppress(KvbatonError):
                await self._engine.delete(container)
            raise

    async def _free_place(self, template: Container, containers: Sequence[Container]) -> str | None:
        """Return the first place of the role's list that no container has; None if its workers need none.

        Raises UnavailableError if all are taken.
        """
        if template.places is None:
            return None
        taken = set()
        for container in containers:
            with suppress(NotFoundError):
                taken.add(place_of(await self._engine.inspect(container.id)))
        for place in template.places:
            if place not in taken:
                return place
        raise UnavailableError(
            f"all GPU places of {template.role.value} workers ({','.join(template.places)}) are taken"
        )
