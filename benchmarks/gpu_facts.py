"""Prints facts about a GPU machine as JSON; run it first on a new machine."""

import json
import platform
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from engine.attention.backend import is_installed

_PACKAGES = (
    "flashinfer",
    "triton",
    "nixl_cu13",
    "pytest",
    "transformers",
    "safetensors",
    "pytest_asyncio",
    "llguidance",
    "zmq",
)

_QUESTIONS = (("-q",), ("nvlink", "-s"), ("topo", "-m"))
_MAX_OUTPUT = 20_000


def gpu_facts() -> dict[str, Any]:
    """Return the device, the versions, the installed packages and the driver's answers; imports only torch."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvcc": shutil.which("nvcc"),
        "installed": {name: is_installed(name) for name in _PACKAGES},
        "versions": {each.name: each.version for each in distributions()},
        "driver": {" ".join(each): _output_of("nvidia-smi", *each) for each in _QUESTIONS},
    }
    if torch.cuda.is_available():
        properties: Any = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        facts["device"] = {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "bytes": total,
            "free_bytes": free,
        }
    return facts


def _output_of(*command: str) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return f"no answer: {error}"
    return (found.stdout + found.stderr).strip()[:_MAX_OUTPUT]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(gpu_facts(), indent=2) + "\n")
