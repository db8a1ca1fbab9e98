"""Logs: one line per record, settings without secrets."""

import asyncio
import io
import logging
from collections.abc import Iterator

import pytest

from serving.logs import configure_logs, log_settings
from serving.settings import Settings


class ExampleSettings(Settings):
    """Two settings, one of them secret."""

    size: int = 3
    cluster_secret: str = "hunter2"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Collect the output of a configured process, and restore the root logger afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    written = io.StringIO()
    configure_logs("decode-0", "info", written)
    yield written
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_record_is_one_line_with_level_process_and_logger(stream: io.StringIO) -> None:
    logging.getLogger("worker.service").warning("lost %s\nnow", "it")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r" WARNING decode-0 worker.service: lost it\nnow")


def test_a_traceback_stays_on_its_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("engine").exception("step failed")
    (line,) = stream.getvalue().splitlines()
    assert "step failed\\nTraceback" in line
    assert line.endswith("ValueError: broken")


@pytest.mark.parametrize("name", ["grpc._cython.cygrpc", "router.service"])
@pytest.mark.parametrize("error", [asyncio.CancelledError(), ValueError("why")])
def test_a_call_that_is_cancelled_at_a_stop_is_no_error_of_grpc(
    stream: io.StringIO, name: str, error: BaseException
) -> None:
    """A stop under load wrote a traceback: gRPC logs the cancellation of a call that has not begun."""
    try:
        raise error
    except BaseException:
        logging.getLogger(name).exception("not handled")
    is_dropped = name.startswith("grpc.") and isinstance(error, asyncio.CancelledError)
    assert bool(stream.getvalue()) is not is_dropped


def test_records_below_the_level_are_dropped(stream: io.StringIO) -> None:
    logging.getLogger("engine").debug("noise")
    assert stream.getvalue() == ""


def test_settings_are_logged_whole_and_secrets_masked(stream: io.StringIO) -> None:
    log_settings(logging.getLogger("up"), ExampleSettings())
    assert stream.getvalue().endswith("up: settings: size=3 cluster_secret='***'\n")
