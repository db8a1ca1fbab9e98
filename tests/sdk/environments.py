"""Python environments for packages that do not go with ours."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.settings import process_environment

_PATIENCE_SECONDS = 300


def environment_with(folder: Path, *packages: str, alone: Sequence[str] = ()) -> str:
    """A new environment in ``folder`` with packages of PyPI in it; its Python.

    alone: packages that are installed without those that they ask for.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install"]
    options = ["--quiet", "--no-compile"]
    subprocess.run([*install, *options, *packages], check=True, timeout=_PATIENCE_SECONDS)
    if alone:
        without = [*install, *options, "--no-deps", *alone]
        subprocess.run(without, check=True, timeout=_PATIENCE_SECONDS)
    return python


def lines_of(python: str, program: str, *arguments: str, **environment: str) -> list[str]:
    """Run a program in such an environment, isolated from ours, and return its output."""
    outer = {name: value for name, value in process_environment().items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [python, "-c", program, *arguments],
        env=outer | environment,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()
