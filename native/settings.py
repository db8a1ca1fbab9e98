"""What is read from the environment: where this user's compiled code is kept."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/kvbaton``, else in the home folder. Raises RuntimeError for a user without one."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvbaton"
