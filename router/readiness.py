"""Whether a request can be answered now."""

from router.model_source import ModelSource
from router.registry import Registry


def what_is_missing(models: ModelSource, registry: Registry) -> str | None:
    """None when the model is known and workers for both legs are attached, else what is not there."""
    return registry.missing() or (None if models.is_known else "the model is not known yet")
