"""The folder of the ``shm`` transport's sockets, and a check of what the transport needs of the system."""

import os
import socket
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from contract.errors import SettingError

_MAX_PATH_BYTES = 107
_FRESH = "kvbaton-shm-"
_CHOOSE = "choose transport auto or tcp"


def why_unsupported(platform: str = sys.platform) -> str | None:
    """Return what this system lacks, or None."""
    if platform != "linux":
        return f"it needs Linux, and this is {platform}"
    try:
        os.close(os.memfd_create("kvbaton-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (AttributeError, OSError) as error:
        return f"this system has no memfd: {error}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return f"this system has no pidfd: {error}"
    return None


def socket_path(folder: Path | None, boot_id: str) -> Path:
    """Return the path of this worker's socket in ``folder``, which is made (0700) if it is missing.

    None: make a folder (0700) with an unpredictable name in the system's temporary folder; peers learn the path on their
    control link, and ``remove_fresh_folder`` removes it. Files of dead workers are removed. Raises SettingError for a path
    that is not a folder, that others may write to, or that is too long.
    """
    path = Path(tempfile.gettempdir() if folder is None else folder).absolute()
    try:
        if folder is None:
            _sweep_fresh_folders(path)
            path = Path(tempfile.mkdtemp(prefix=_FRESH, dir=path))
        else:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_folder(path)
    except OSError as error:
        raise _unusable(path, str(error)) from error
    found = path / f"{boot_id}.sock"
    if len(os.fsencode(found)) > _MAX_PATH_BYTES:
        raise _unusable(path, f"a socket's path may have {_MAX_PATH_BYTES} bytes; {found} is longer")
    _sweep(path)
    return found


def remove_fresh_folder(path: Path) -> None:
    """Remove the folder that ``socket_path(None, ...)`` has made, after its socket."""
    with suppress(OSError):
        path.rmdir()


def _sweep_fresh_folders(base: Path) -> None:
    """Remove this user's folders whose workers are dead. A folder without a socket is being made, and stays."""
    for folder in base.glob(f"{_FRESH}*"):
        with suppress(OSError):
            info = folder.lstat()
            if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and _sweep(folder):
                remove_fresh_folder(folder)


def _check_folder(path: Path) -> None:
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise _unusable(path, "it is not a folder")
    if info.st_uid not in (os.getuid(), 0):
        raise _unusable(path, f"it belongs to user {info.st_uid}")
    if info.st_mode & 0o022 and not _is_volume(path):
        raise _unusable(path, f"others may write to it (mode {stat.S_IMODE(info.st_mode):04o}); make it 0700")


def _is_volume(path: Path) -> bool:
    """Return True for a mounted folder: containers share one so, often with permissions that they cannot change."""
    return path.is_mount()


def _unusable(path: Path, why: str) -> SettingError:
    return SettingError(f"shm_dir {path} cannot be used: {why}; set another, or {_CHOOSE}", param="shm_dir")


def _sweep(folder: Path) -> int:
    """Remove sockets without a listener; return how many. A living worker's file appears only when it listens."""
    num_removed = 0
    for path in folder.glob("*.sock"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                sock.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                num_removed += 1
    return num_removed


def listen_at(path: Path) -> socket.socket:
    """Return a listening Unix socket, reachable by this user only. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unready = path.with_suffix(".new")
    try:
        listener.bind(str(unready))
        unready.chmod(0o600)
        listener.listen(128)
        unready.rename(path)
    except BaseException:
        listener.close()
        unready.unlink(missing_ok=True)
        raise
    return listener
