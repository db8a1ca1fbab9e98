"""How much the processor's caches hold, as Linux tells it."""

from pathlib import Path

_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")


def last_cache_bytes(folder: Path = _FOLDER) -> int:
    """The largest cache that one core can fill by itself; 0 where nobody tells."""
    sizes = [path.read_text().strip() for path in folder.glob("index*/size")]
    return max(
        (int(size[:-1]) * 1024 for size in sizes if size[:-1].isdigit() and size[-1] == "K"), default=0
    )
