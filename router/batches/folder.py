"""The folder of files and batches: its lock, its records and its data files.

It has ``lock``; ``ID.json``, the record of a file or batch; ``ID.data``, the content of a file, or the results of a batch so
far. An ID is made by this service: no part of a path comes from a client.
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
from router.batches.disk import Disk
from router.batches.records import VERSION, BatchRecord, FileRecord

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
        if record.id != path.name.removesuffix(_RECORD):
            raise self._unusable(f"holds {path.name}, which is a copy of the record of {record.id[:80]!r}")
        if record.version != VERSION:
            raise self._unusable(
                f"holds {path.name} of version {record.version}; this router reads version {VERSION}"
            )
        return record

    def _unusable(self, reason: str) -> SettingError:
        return SettingError(f"files_dir {self._path} {reason}", param="files_dir")
