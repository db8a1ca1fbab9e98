"""The limits, the command and the environment of processes that run a model author's templates and patterns."""

import json
import os
import sys
from dataclasses import dataclass

_NEEDED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PATH", "TZ")
"""Variables that an interpreter may need to start, and that templates see: ``strftime_now`` uses the time zone."""


@dataclass(frozen=True)
class RenderLimits:
    """The limits of one rendering: CPU time, address space of the process, and characters of the prompt.

    wall_seconds: time limit of an answer, for which the process may have to wait for a CPU.
    """

    cpu_seconds: float = 2.0
    max_memory_bytes: int = 640 * 2**20
    max_output_characters: int = 32 * 2**20
    wall_seconds: float = 60.0


def render_environment() -> dict[str, str]:
    """Return the environment of such a process: without API keys and other secrets, since it runs an author's program."""
    return {name: os.environ[name] for name in _NEEDED if name in os.environ}


def child_command(module: str) -> list[str]:
    """Return the command that runs ``main`` of a module of ours, without the site's own start-up code and variables."""
    program = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main()"
    return [sys.executable, "-S", "-E", "-c", program, json.dumps(sys.path)]
