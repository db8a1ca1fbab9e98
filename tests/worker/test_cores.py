"""The cores that a worker is bound to."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from contract.errors import SettingError
from worker.cores import parse_cores, run_on, show_cores
from worker.settings import WorkerSettings


@pytest.mark.parametrize(
    ("text", "cores"), [("3", (3,)), ("0-3,8", (0, 1, 2, 3, 8)), ("4, 2-2,4", (4, 2)), ("1-2,2-3", (1, 2, 3))]
)
def test_the_format_is_that_of_taskset(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores
    assert parse_cores(show_cores(cores)) == cores


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "1,,2", "-1", "²"])
def test_other_text_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValidationError, match="give numbers and ranges"):
        WorkerSettings(model=tmp_path, cores=text)


@pytest.mark.parametrize("text", ["0-99999999999", "9" * 5000])
def test_a_number_that_no_core_has_is_refused_at_once(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValidationError, match="no machine has a core of that number"):
        WorkerSettings(model=tmp_path, cores=text)


def test_there_is_a_core_for_each_thread(tmp_path: Path) -> None:
    settings = WorkerSettings(model=tmp_path, cores="1-2", num_threads=2)
    assert settings.engine_settings().cores == (1, 2)
    with pytest.raises(ValidationError, match="2 for num_threads 3"):
        WorkerSettings(model=tmp_path, cores="1-2", num_threads=3)


def _cores_after(cores: tuple[int, ...], found: Any) -> None:
    run_on(cores)
    found.put(sorted(os.sched_getaffinity(0)))


def test_the_process_is_bound_to_its_cores() -> None:
    last = max(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    child = context.Process(target=_cores_after, args=((last,), found))
    child.start()
    assert found.get() == [last]
    child.join()


def test_an_unavailable_core_is_named() -> None:
    with pytest.raises(SettingError, match="core 99999 is not available"):
        run_on((99999,))
