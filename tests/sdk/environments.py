"""Python environments for packages that do not go with ours."""

import subprocess
import sys
from pathlib import Path

_PATIENCE_SECONDS = 300


def environment_with(package: str, folder: Path) -> str:
    """A new environment in ``folder`` with a package of PyPI in it; its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
    subprocess.run(install, check=True, timeout=_PATIENCE_SECONDS)
    return python
