"""Fixtures for all tests."""

import asyncio
import gc
import signal
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
# A shell starts background jobs with Ctrl-C ignored; processes that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
_ROOT = Path(__file__).parent
_SERVICES = ("router", "serving", "worker")
"""Folders of tests that run in the event loop of the services (``serving/event_loop.py``)."""


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return what makes the event loop of a test, by its name."""
    if item.path.relative_to(_ROOT).parts[0] in _SERVICES:
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


def pytest_collection_finish() -> None:
    """Take all modules and tests out of the search for garbage: tests that call it would pay for them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the demo model that is shipped in the package."""
    return Path(str(resources.files("kvbaton"))) / "demo_model"


@pytest.fixture
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make drafts worth their time in engines of this process, however busy the machine is."""
    # Imported here: most tests need no torch.
    from engine.scheduling.batch import drafting
    from tests.drafting_engines import FreeSteps

    monkeypatch.setattr(drafting, "StepCost", FreeSteps)
