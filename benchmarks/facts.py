"""Facts about a run: the machine, the commit and the versions."""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "transformers", "tokenizers", "grpcio", "msgspec")


def run_facts() -> dict[str, Any]:
    """Return machine, commit (``-dirty`` with uncommitted changes other than results), date and versions of this run.

    On a machine without git the commit is "unknown", and a package that is not installed has no version.
    """
    changes = _git(
        "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)benchmarks/results"
    )
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": (_git("describe", "--always") or "unknown") + ("-dirty" if changes else ""),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version()}
        | {name: version for name in _PACKAGES if (version := _version(name))},
    }


def versions_in(python: str, *packages: str) -> dict[str, str]:
    """Return the versions of packages in another Python. Raises CalledProcessError if a package is missing."""
    look = "import importlib.metadata as m, json, sys; print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"
    found: dict[str, str] = json.loads(subprocess.check_output([python, "-P", "-c", look, *packages]))
    return found


def write_result(name: str, figures: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write ``figures`` with this run's facts to ``<name>.json`` in ``folder``."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**run_facts(), "figures": figures}, indent=2) + "\n")
    return path


def read_figures(name: str) -> dict[str, Any]:
    """Read the figures that ``write_result`` wrote last under this name. Raises FileNotFoundError."""
    figures: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
    return figures


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    here = Path(__file__).parent
    try:
        found = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return found.stdout.strip()


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    fields = dict(_field(line) for line in info.read_text().splitlines() if ":" in line)
    name = fields.get("model name", "unknown")
    return (
        f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else name
    )


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def command_line(module: str) -> str:
    """Return this benchmark's command line, with paths reduced to their last part, to hide the machine's folders."""
    words = ["…/" + Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return shlex.join(["python", "-m", module, *words])
