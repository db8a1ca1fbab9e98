"""Compiles ``blocks.c`` when it is first needed on a machine, keeps it for this user, and does without where it must.

A library beside the source is taken as it is: that is how an image without a compiler comes to it
(``python -m kv_transfer.native.compiling FILE`` makes one).
"""

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kv_transfer.native.settings import cache_folder

logger = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("blocks.c")
PREBUILT = SOURCE.with_suffix(".so")
_COMPILER, _OPTIONS = "cc", ("-O2", "-fPIC", "-shared")
_COMPILER_SECONDS = 60.0
CopyBlocks = Callable[[int, int, int, int, int, int, int, bool], None]
"""(target, where its ids are, source, where its ids are, number of blocks, bytes of a block, bytes to copy, past caches?).

Lets go of Python's lock. The ids, of 64 bits, are not checked.
"""


def load_copy_blocks(
    prebuilt: Path = PREBUILT, folder: Path | None = None, compiler: str = _COMPILER
) -> CopyBlocks | None:
    """``kvbaton_copy_blocks``; None where it cannot be had, which is logged.

    folder: where it is kept; the user's cache folder without one.
    """
    try:
        library = prebuilt if prebuilt.is_file() else _kept(folder or cache_folder(), compiler)
        copy_blocks = ctypes.CDLL(str(library)).kvbaton_copy_blocks
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        logger.warning("blocks are copied by Python, which takes longer: %s", _why(error, compiler))
        return None
    copy_blocks.restype = None
    address, number = ctypes.c_void_p, ctypes.c_size_t
    copy_blocks.argtypes = (address, address, address, address, number, number, number, ctypes.c_int)
    found: CopyBlocks = copy_blocks
    return found


def compile_to(target: Path, compiler: str = _COMPILER) -> None:
    """Make the library; whoever opens ``target`` sees all of it or none. Raises OSError, SubprocessError."""
    unready = target.with_suffix(f".{os.getpid()}.new")
    try:
        command = (compiler, *_OPTIONS, "-o", str(unready), str(SOURCE))
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILER_SECONDS)
        unready.replace(target)
    finally:
        unready.unlink(missing_ok=True)


def _kept(folder: Path, compiler: str) -> Path:
    """The library of this source for this kind of machine, compiled unless it was before."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to another user, or others may write to it")
    made_of = hashlib.sha256(SOURCE.read_bytes() + " ".join(_OPTIONS).encode()).hexdigest()[:16]
    library = folder / f"blocks-{made_of}-{platform.machine()}.so"
    if not library.exists():
        compile_to(library, compiler)
    return library


def _why(error: Exception, compiler: str) -> str:
    if isinstance(error, FileNotFoundError) and error.filename == compiler:
        return f"there is no C compiler ({compiler})"
    if isinstance(error, subprocess.CalledProcessError):
        return f"the C compiler failed: {error.stderr.strip()}"
    return str(error)


if __name__ == "__main__":
    compile_to(Path(sys.argv[1]))
