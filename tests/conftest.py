"""Fixtures for all tests."""

import signal
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
# A shell starts background jobs with Ctrl-C ignored; processes that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the demo model that is shipped in the package."""
    return Path(str(resources.files("kvbaton"))) / "demo_model"
