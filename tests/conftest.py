"""What every test may use."""

from importlib import resources
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the demo model that is shipped in the package."""
    return Path(str(resources.files("kvbaton"))) / "demo_model"
