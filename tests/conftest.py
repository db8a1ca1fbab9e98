"""What every test may use."""

from importlib import resources
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the demo model that is shipped in the package."""
    return Path(str(resources.files("kvbaton"))) / "demo_model"
