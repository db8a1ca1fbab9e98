"""The folder of the user's compiled code, from the environment."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/kvbaton``, else the home folder's cache. Raises RuntimeError without a home folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvbaton"
