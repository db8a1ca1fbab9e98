"""The compiled block copy (``blocks.c``), and the size of the caches that it is tuned by.

``python -m kv_transfer.native.compiling FILE`` compiles the library for an image without a compiler.
"""

import ctypes
import logging
import sys
from collections.abc import Callable
from pathlib import Path

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
    try:
        copy_blocks = BLOCKS.load(prebuilt, folder, compiler).kvbaton_copy_blocks
    except (NotCompiledError, AttributeError) as error:
        logger.warning("falling back to the slower block copy in Python: %s", error)
        return None
    copy_blocks.restype = None
    address = ctypes.c_void_p
    number = ctypes.c_size_t
    copy_blocks.argtypes = (address, address, address, address, number, number, number, ctypes.c_int)
    found: CopyBlocks = copy_blocks
    return found


def last_cache_bytes(folder: Path = _CACHE_FOLDER) -> int:
    """Return the size of the largest cache that one core can fill; 0 if Linux does not report it."""
    sizes = [path.read_text().strip() for path in folder.glob("index*/size")]
    return max(
        (int(size[:-1]) * 1024 for size in sizes if size[:-1].isdigit() and size[-1] == "K"), default=0
    )


if __name__ == "__main__":
    BLOCKS.compile_to(Path(sys.argv[1]))
