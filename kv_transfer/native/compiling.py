"""Compiles ``blocks.c`` when it is first needed on a machine (``native.compiling``), and does without where it must.

``python -m kv_transfer.native.compiling FILE`` makes the library for an image without a compiler.
"""

import ctypes
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from native.compiling import CLibrary, NotCompiledError

logger = logging.getLogger(__name__)
BLOCKS = CLibrary("blocks", Path(__file__).parent, ("-O2",))
CopyBlocks = Callable[[int, int, int, int, int, int, int, bool], None]
"""(target, where its ids are, source, where its ids are, number of blocks, bytes of a block, bytes to copy, past caches?).

Lets go of Python's lock. The ids, of 64 bits, are not checked.
"""


def load_copy_blocks(
    prebuilt: Path | None = None, folder: Path | None = None, compiler: str = "cc"
) -> CopyBlocks | None:
    """``kvbaton_copy_blocks``; None where it cannot be had, which is logged.

    folder: where it is kept; the user's cache folder without one.
    """
    try:
        copy_blocks = BLOCKS.load(prebuilt, folder, compiler).kvbaton_copy_blocks
    except (NotCompiledError, AttributeError) as error:
        logger.warning("blocks are copied by Python, which takes longer: %s", error)
        return None
    copy_blocks.restype = None
    address = ctypes.c_void_p
    number = ctypes.c_size_t
    copy_blocks.argtypes = (address, address, address, address, number, number, number, ctypes.c_int)
    found: CopyBlocks = copy_blocks
    return found


if __name__ == "__main__":
    BLOCKS.compile_to(Path(sys.argv[1]))
