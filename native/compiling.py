"""Compiles a folder of C sources to a library at first use on a machine, and caches it for the user.

A library beside the sources is used instead, for images without a compiler.
"""

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from native.settings import cache_folder

_COMPILER = "cc"
_ALWAYS = ("-fPIC", "-shared")
_COMPILER_SECONDS = 120.0


def compiler_command(compiler: str = _COMPILER) -> tuple[str, ...]:
    """Return the command that runs a C compiler.

    On a machine without ``cc``, it is the compiler of PyPI's package ``ziglang`` if that is installed.
    """
    is_missing = compiler == _COMPILER and shutil.which(compiler) is None
    if is_missing and importlib.util.find_spec("ziglang") is not None:
        return sys.executable, "-m", "ziglang", "cc"
    return (compiler,)


class NotCompiledError(Exception):
    """There is no library; the message contains the reason."""


@dataclass(frozen=True)
class CLibrary:
    """The C files of one folder as one library. options: those of the compiler."""

    name: str
    folder: Path
    options: tuple[str, ...]

    @property
    def prebuilt(self) -> Path:
        """The path of a library that is shipped with the sources."""
        return self.folder / f"{self.name}.so"

    def load(
        self, prebuilt: Path | None = None, kept_in: Path | None = None, compiler: str = _COMPILER
    ) -> ctypes.CDLL:
        """Load the library, which is cached in ``kept_in`` or the user's cache folder. Raises NotCompiledError."""
        shipped = prebuilt or self.prebuilt
        try:
            library = shipped if shipped.is_file() else self._kept(kept_in or cache_folder(), compiler)
            return ctypes.CDLL(str(library))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            raise NotCompiledError(_why(error, compiler)) from error

    def compile_to(self, target: Path, compiler: str = _COMPILER) -> None:
        """Compile the library; ``target`` is replaced atomically. Raises OSError, SubprocessError."""
        # Under a name of its own until it is whole: several processes may compile at the same time.
        unready = target.with_suffix(f".{os.getpid()}.new")
        sources = map(str, sorted(self.folder.glob("*.c")))
        try:
            command = (*compiler_command(compiler), *self.options, *_ALWAYS, "-o", str(unready), *sources)
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILER_SECONDS)
            unready.replace(target)
        finally:
            unready.unlink(missing_ok=True)

    def _kept(self, folder: Path, compiler: str) -> Path:
        """Return the cached library of these sources and this kind of machine, compiled if necessary."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
        # Code of this folder runs in this process: no other user may put any there.
        if info.st_uid != os.getuid() or info.st_mode & 0o022:
            raise PermissionError(f"{folder} belongs to another user, or others may write to it")
        # The name has the digest of its sources, so that a change of the sources is never served by an older library.
        made_of = hashlib.sha256(" ".join((*self.options, *_ALWAYS)).encode())
        for file in sorted((*self.folder.glob("*.c"), *self.folder.glob("*.h"))):
            made_of.update(file.read_bytes())
        library = folder / f"{self.name}-{made_of.hexdigest()[:16]}-{platform.machine()}.so"
        if not library.exists():
            self.compile_to(library, compiler)
        return library


def _why(error: Exception, compiler: str) -> str:
    if isinstance(error, FileNotFoundError) and error.filename == compiler:
        return f"there is no C compiler ({compiler}); install one, or PyPI's package ziglang"
    if isinstance(error, subprocess.CalledProcessError):
        return f"the C compiler failed: {error.stderr.strip()}"
    return str(error)
