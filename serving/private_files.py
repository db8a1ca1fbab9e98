"""Reads small files named by settings, and detects their changes; others must not be able to read or replace secrets."""

import os
import stat
from collections.abc import Callable, Collection
from pathlib import Path

from contract.errors import SettingError

_MAX_BYTES = 2**20
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
Stamp = tuple[int, ...] | None


def read_private_file(path: Path, param: str) -> bytes:
    """Return the file's bytes. Raises SettingError if it cannot be read or is not private.

    Private means: a regular file of this user or of root, without permissions for group and others, in a folder in which no
    other user can replace it. Links are followed, and the folders at both ends are checked. One exception: a file of root
    may be readable by a group of this process, which is how Kubernetes mounts a secret for a service that is not root.
    """

    def check(info: os.stat_result) -> None:
        _check_file(path, info, param)
        for folder in {path.absolute().parent, path.resolve().parent}:
            _check_folder(path, folder, param)

    return _read(path, param, check)


def read_public_file(path: Path, param: str) -> bytes:
    """Return the bytes of a regular file that others may read. Raises SettingError for other files and too large ones."""
    return _read(path, param, lambda info: _check_kind(path, info, param))


def _read(path: Path, param: str, check: Callable[[os.stat_result], None]) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would block
        with os.fdopen(descriptor, "rb") as file:
            check(os.fstat(descriptor))
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise SettingError(
            f"{param} {path} cannot be read: {error.strerror or error}", param=param
        ) from error
    if len(data) > _MAX_BYTES:
        raise SettingError(f"{param} {path} has more than {_MAX_BYTES} bytes", param=param)
    return data


def read_private_text(path: Path, param: str) -> str:
    """Return the text of a private file. Raises SettingError also if it is not UTF-8."""
    try:
        return read_private_file(path, param).decode()
    except UnicodeDecodeError as error:
        raise SettingError(f"{param} {path} cannot be read: it is not UTF-8 text", param=param) from error


def _check_kind(path: Path, info: os.stat_result, param: str) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise SettingError(f"{param} {path} is not a regular file", param=param)


def _check_file(path: Path, info: os.stat_result, param: str) -> None:
    _check_kind(path, info, param)
    if info.st_uid not in (os.geteuid(), 0):
        raise SettingError(
            f"{param} {path} belongs to user {info.st_uid}; it must belong to user {os.geteuid()} or to root",
            param=param,
        )
    excess = info.st_mode & _OTHERS
    if info.st_uid == 0 and os.geteuid() != 0 and info.st_gid in {os.getegid(), *os.getgroups()}:
        excess &= ~stat.S_IRGRP
    if excess:
        raise SettingError(
            f"{param} {path} has mode {stat.S_IMODE(info.st_mode):04o}: other users may access it;"
            f" `chmod 600 {path}`",
            param=param,
        )


def _check_folder(path: Path, folder: Path, param: str) -> None:
    info = folder.stat()
    # With the sticky bit, as in /tmp, only the owner of a file can rename or remove it.
    if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
        raise SettingError(
            f"{param} {path} is in {folder} of mode {stat.S_IMODE(info.st_mode):04o}, where every user can replace it;"
            f" `chmod o-w {folder}`",
            param=param,
        )
    if who := who_else_may_replace(info, os.geteuid(), {os.getegid(), *os.getgroups()}):
        raise SettingError(f"{param} {path} is in {folder}, where {who} can replace it", param=param)


def who_else_may_replace(info: os.stat_result, own_user: int, own_groups: Collection[int]) -> str | None:
    """Return which other user or group may rename files in a folder; None if only this user, its groups and root may."""
    if info.st_uid not in (own_user, 0):
        return f"its owner, user {info.st_uid},"
    if info.st_mode & stat.S_IWGRP and not info.st_mode & stat.S_ISVTX and info.st_gid not in own_groups:
        return f"group {info.st_gid}"
    return None


def stamp_of(file: Path) -> Stamp:
    """Return a value that changes with the file (with a link's target); None if the file does not exist."""
    try:
        found = file.stat()
    except OSError:
        return None
    # The content may change within one tick of the clock, or with the old time set again: the other numbers show that.
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
