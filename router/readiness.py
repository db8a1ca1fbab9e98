"""The conditions under which a request can be answered."""

from router.model_source import ModelSource
from router.registry import Registry


def what_is_missing(models: ModelSource, registry: Registry) -> str | None:
    """Describe what is missing; return None if the model is known and workers for all legs are attached."""
    return registry.missing() or (None if models.is_known else "the model is not known yet")
