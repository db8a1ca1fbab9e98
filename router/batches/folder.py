"""The folder of files and batches: its lock, its records and its data files.

It has ``lock``; ``ID.json``, the record of a file or batch; ``ID.data``, the content of a file, or the results of a batch so
far. An ID is made by this service: no part of a path comes from a client.

The content of an upload and every record are synced before a client gets an answer about them; a record is written to a
temporary file, synced, and renamed over the old one, then the folder is synced. Result lines are appended with one write
each and synced when their batch ends. They survive the death of the process at any moment. Lines that a power failure loses
are computed again, since the tail of a result file is checked when it is opened.
"""

import fcntl
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import msgspec

from contract.decoding import json_decoder
from contract.errors import SettingError
from router.batches.records import VERSION, BatchRecord, FileRecord

_PRIVATE = 0o600


class Disk:
    """The operating system's file operations. Every method raises OSError."""

    def create(self, path: Path) -> int:
        """Open a new file of this user for writing and return its descriptor. Raises FileExistsError."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, _PRIVATE)

    def append_to(self, path: Path) -> int:
        """Open a file of this user, or create it, for appending, and return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, _PRIVATE)

    def write(self, descriptor: int, data: bytes) -> None:
        """Write all of ``data``. After an error a part of it may have been written."""
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    def sync(self, descriptor: int) -> None:
        """Wait until the file's content would survive a power failure."""
        os.fsync(descriptor)

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file to ``size`` bytes."""
        os.truncate(path, size)

    def replace(self, source: Path, target: Path) -> None:
        """Rename ``source`` to ``target``, replacing it."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file, if it exists."""
        path.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Wait until the names in a folder would survive a power failure."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


FILE_PREFIX = "file-"
BATCH_PREFIX = "batch_"
_RECORD = ".json"
_DATA = ".data"
_ASIDE = ".tmp"
_OWN_NAME = re.compile(
    rf"(?P<id>({FILE_PREFIX}|{BATCH_PREFIX})[0-9a-f]{{32}})(?P<kind>\{_DATA}|\{_RECORD}\{_ASIDE})"
)
Record = TypeVar("Record", FileRecord, BatchRecord)


class Folder:
    """Owns a folder from ``open`` to ``close``; no other router can use it in that time."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._lock: int | None = None

    def open(self) -> None:
        """Create the folder if it does not exist, and lock it. Raises SettingError about ``files_dir``."""
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = self._path.stat().st_mode
            lock = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise self._unusable(f"cannot be used: {error.strerror or error}") from error
        try:
            # another user could put a record there that gives out the files of others
            if mode & 0o022:
                raise self._unusable(
                    f"can be written to by other users (mode {mode & 0o777:o}); chmod 700 it"
                )
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise self._unusable("is used by another router; each needs a folder of its own") from error
        except SettingError:
            os.close(lock)
            raise
        self._lock = lock

    def close(self) -> None:
        """Unlock the folder. Does nothing if it is not locked."""
        lock = self._lock
        self._lock = None
        if lock is not None:
            os.close(lock)

    def records(self, prefix: str, kind: type[Record]) -> list[Record]:
        """Read every record of one kind, oldest first. Raises SettingError that names an unreadable one."""
        found = [self._read(path, kind) for path in self._path.glob(f"{prefix}*{_RECORD}")]
        return sorted(found, key=lambda record: record.sequence)

    def write(self, record: FileRecord | BatchRecord) -> None:
        """Replace a record atomically: after a crash the old one or the new one is there. Raises OSError."""
        target = self._path / f"{record.id}{_RECORD}"
        aside = target.with_suffix(_RECORD + _ASIDE)
        # a crash may have left it, and ``create`` refuses a file that exists
        self._disk.remove(aside)
        descriptor = self._disk.create(aside)
        try:
            self._disk.write(descriptor, msgspec.json.encode(record))
            self._disk.sync(descriptor)
        finally:
            os.close(descriptor)
        self._disk.replace(aside, target)
        self._disk.sync_folder(self._path)

    def remove(self, record_id: str) -> None:
        """Remove a record and then its data. Raises OSError."""
        self._disk.remove(self._path / f"{record_id}{_RECORD}")
        # after the record: data without a record is removed at the next start, a record without data would be served
        self._disk.remove(self.data(record_id))

    def data(self, record_id: str) -> Path:
        """Return the path of a file's data, which may exist before its record does."""
        return self._path / f"{record_id}{_DATA}"

    def remove_leftovers(self, expected: Collection[str]) -> None:
        """Remove the leftovers of a crash: partial records, and data whose id is not in ``expected``. Raises OSError.

        Files with names that this service does not make are kept.
        """
        for path in self._path.iterdir():
            own = _OWN_NAME.fullmatch(path.name)
            if own and (own["kind"] != _DATA or own["id"] not in expected):
                self._disk.remove(path)

    def _read(self, path: Path, kind: type[Record]) -> Record:
        try:
            record: Record = json_decoder(kind).decode(path.read_bytes())
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._unusable(f"holds {path.name}, which cannot be read: {error}") from error
        # else a copied record would give two names to one file, and to delete one would break the other
        if record.id != path.name.removesuffix(_RECORD):
            raise self._unusable(f"holds {path.name}, which is a copy of the record of {record.id[:80]!r}")
        if record.version != VERSION:
            raise self._unusable(
                f"holds {path.name} of version {record.version}; this router reads version {VERSION}"
            )
        return record

    def _unusable(self, reason: str) -> SettingError:
        return SettingError(f"files_dir {self._path} {reason}", param="files_dir")
