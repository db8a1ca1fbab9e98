"""The limits and the environment of the process that renders chat templates."""

import os
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
    """Return the environment of the process: without API keys and other secrets, since it runs a model author's program."""
    return {name: os.environ[name] for name in _NEEDED if name in os.environ}
