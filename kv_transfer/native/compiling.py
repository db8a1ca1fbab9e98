"""The compiled block copy (``blocks.c``), and the size of the caches that it is tuned by.

``python -m kv_transfer.native.compiling FILE`` compiles the library for an image without a compiler.
"""

import ctypes
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from native.compiling import CLibrary, NotCompiledError

logger = logging.getLogger(__name__)
BLOCKS = CLibrary("blocks", Path(__file__).parent, ("-O2",))
_CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")
CopyBlocks = Callable[[int, int, int, int, int, int, int, bool], None]
"""(target, address of its ids, source, address of its ids, number of blocks, block size, bytes to copy, past caches?).

Releases the GIL. The ids, 64 bits each, are not checked.
"""


def load_copy_blocks(
    prebuilt: Path | None = None, folder: Path | None = None, compiler: str = "cc"
) -> CopyBlocks | None:
    """Return ``kvbaton_copy_blocks``, or None (and log why) if it cannot be compiled or loaded.

    folder: where the library is kept; None is the user's cache folder.
    """
    address = ctypes.c_void_p
    number = ctypes.c_size_t
    types = (address, address, address, address, number, number, number, ctypes.c_int)
    return load_function(
        "kvbaton_copy_blocks", types, "the slower block copy in Python", prebuilt, folder, compiler
    )


def load_function(
    name: str, types: Sequence[Any], instead: str, prebuilt: Path | None, folder: Path | None, compiler: str
) -> Callable[..., None] | None:
    """Return a function of the library with arguments of these types; None, and log ``instead``, if it cannot be loaded."""
    try:
        found = getattr(BLOCKS.load(prebuilt, folder, compiler), name)
    except (NotCompiledError, AttributeError) as error:
        logger.warning("falling back to %s: %s", instead, error)
        return None
    found.restype = None
    found.argtypes = tuple(types)
    function: Callable[..., None] = found
    return function


def last_cache_bytes(folder: Path = _CACHE_FOLDER) -> int:
    """Return the size of the largest cache that one core can fill; 0 if Linux does not report it."""
    sizes = [path.read_text().strip() for path in folder.glob("index*/size")]
    return max(
        (int(size[:-1]) * 1024 for size in sizes if size[:-1].isdigit() and size[-1] == "K"), default=0
    )


if __name__ == "__main__":
    BLOCKS.compile_to(Path(sys.argv[1]))
