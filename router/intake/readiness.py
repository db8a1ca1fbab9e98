"""The conditions under which a request can be answered."""

from collections.abc import Callable

from contract.identity import Role
from router.intake.model_source import ModelSource
from router.routing.role_changes import missing_roles
from router.workers.registry import Registry

Wakes = Callable[[frozenset[Role]], bool]
"""Returns True if an autoscaler starts workers of these roles for a request that waits."""


def what_is_missing(models: ModelSource, registry: Registry, wakes: Wakes) -> str | None:
    """Describe what is missing; return None if the model is known and workers for all legs are attached, or can be woken."""
    missing = registry.missing()
    if missing is not None:
        serving = {worker.role for worker in registry.workers if worker.has_credit}
        if wakes(missing_roles(serving, embeds_only=registry.embeds_only)):
            missing = None
    return missing or (None if models.is_known else "the model is not known yet")
