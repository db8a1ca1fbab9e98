"""Compiles kernels in a process without the interpreter."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.chaos.settings import process_environment


def compiled(cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return the facts of kernels, one in each line that Python prints with these arguments. cache: an empty folder."""
    environment = {name: value for name, value in process_environment().items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, *arguments],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=240,  # it takes 20 s alone, and 100 on a busy machine
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]
