"""The files and batches of all clients in the folder.

Every method blocks and is called on the thread of ``router.batches.storage``, so no two calls overlap. Each call names the
owner; the objects of other owners are not found.
"""

import os
import secrets
from collections.abc import Callable, Iterable
from typing import BinaryIO

from contract.errors import InvalidRequestError, NotFoundError, PayloadTooLargeError
from router.batches.disk import Disk
from router.batches.folder import BATCH_PREFIX, FILE_PREFIX, Folder
from router.batches.quota import FolderLimits, Quota
from router.batches.records import BatchRecord, FileRecord, Purpose


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed: 128 random bits."""
    return f"{prefix}{secrets.token_hex(16)}"


class Store:
    """Owns the records of the folder between ``open`` and ``close``. clock: Unix seconds."""

    def __init__(self, folder: Folder, disk: Disk, limits: FolderLimits, clock: Callable[[], float]) -> None:
        self.folder = folder
        self.disk = disk
        self.limits = limits
        self._clock = clock
        self.quota = Quota(limits)
        self._sequence = 0
        self._files: dict[str, FileRecord] = {}
        self._batches: dict[str, BatchRecord] = {}

    @property
    def now(self) -> int:
        """Unix seconds."""
        return int(self._clock())

    def open(self) -> None:
        """Lock the folder, read it, and remove the leftovers of a crash. Raises SettingError, OSError."""
        self.folder.open()
        self._files = {record.id: record for record in self.folder.records(FILE_PREFIX, FileRecord)}
        self._batches = {record.id: record for record in self.folder.records(BATCH_PREFIX, BatchRecord)}
        records: list[FileRecord | BatchRecord] = [*self._files.values(), *self._batches.values()]
        for record in records:
            self._count(record, 1)
            self._sequence = max(self._sequence, record.sequence)
        self.folder.remove_leftovers({*self._files, *self._reserved()})
        self.sweep()

    def close(self) -> None:
        """Unlock the folder."""
        self.folder.close()

    def sweep(self) -> None:
        """Remove expired files, and batches that are over and older than the retention time. Raises OSError."""
        now = self.now
        used = self._inputs_in_use()
        for file in [file for file in self._files.values() if file.expires_at <= now and file.id not in used]:
            self._remove(file)
        kept_since = now - self.limits.retention_seconds
        for batch in [b for b in self._batches.values() if not b.is_open and b.created_at <= kept_since]:
            self._remove(batch)

    def files(self, owner: str) -> list[FileRecord]:
        """Return the files of ``owner``, oldest first."""
        now = self.now
        return [file for file in self._files.values() if file.owner == owner and file.expires_at > now]

    def file(self, owner: str, file_id: str, *, param: str = "id") -> FileRecord:
        """Return a file. Raises NotFoundError."""
        found = self._files.get(file_id)
        if found is None or found.owner != owner or found.expires_at <= self.now:
            raise NotFoundError(f"No such File object: {file_id[:80]}", param=param)
        return found

    def open_file(self, file: FileRecord) -> BinaryIO:
        """Open a file for reading; it can be read to its end even if the file is deleted meanwhile. Raises OSError."""
        return self.folder.data(file.id).open("rb")

    def delete_file(self, owner: str, file_id: str) -> None:
        """Remove a file. Raises NotFoundError, InvalidRequestError for the input of an open batch, OSError."""
        file = self.file(owner, file_id)
        if file.id in self._inputs_in_use():
            raise InvalidRequestError(
                f"{file.id} is the input of a batch that is not over; cancel the batch first", param="id"
            )
        self._remove(file)

    def add_file(
        self, file_id: str, owner: str, num_bytes: int, filename: str, purpose: Purpose, seconds: int | None
    ) -> FileRecord:
        """Add the record of a file whose data is on the disk, to be kept for ``seconds``. Raises OSError.

        If the record exists, it is not changed: a router that was killed may repeat the call.
        """
        if (known := self._files.get(file_id)) is not None:
            return known
        now = self.now
        kept = min(seconds or self.limits.retention_seconds, self.limits.retention_seconds)
        record = FileRecord(
            id=file_id,
            owner=owner,
            sequence=self.next_sequence(),
            num_bytes=num_bytes,
            filename=filename,
            purpose=purpose,
            created_at=now,
            expires_at=now + kept,
        )
        self._write(record)
        return record

    def batches(self, owner: str) -> list[BatchRecord]:
        """Return the batches of ``owner``, oldest first."""
        return [batch for batch in self._batches.values() if batch.owner == owner]

    def open_batches(self) -> list[BatchRecord]:
        """Return the open batches of all owners, oldest first."""
        return [batch for batch in self._batches.values() if batch.is_open]

    def all_files(self) -> Iterable[FileRecord]:
        """Return the files of all owners."""
        return self._files.values()

    def all_batches(self) -> Iterable[BatchRecord]:
        """Return the batches of all owners."""
        return self._batches.values()

    def batch(self, owner: str, batch_id: str) -> BatchRecord:
        """Return a batch. Raises NotFoundError."""
        found = self._batches.get(batch_id)
        if found is None or found.owner != owner:
            raise NotFoundError(f"No batch found with id '{batch_id[:80]}'.", param="batch_id")
        return found

    def put_batch(self, batch: BatchRecord) -> BatchRecord:
        """Store a new record, or replace the old one, and return it. Raises OSError."""
        self._write(batch)
        return batch

    def next_sequence(self) -> int:
        """Return a number greater than that of every record."""
        self._sequence += 1
        return self._sequence

    def _reserved(self) -> set[str]:
        """Return the ids of the results of open batches, which have data but no record yet."""
        return {name for batch in self.open_batches() for name in (batch.output_file_id, batch.error_file_id)}

    def _inputs_in_use(self) -> set[str]:
        return {batch.input_file_id for batch in self.open_batches()}

    def _write(self, record: FileRecord | BatchRecord) -> None:
        self.folder.write(record)
        if isinstance(record, FileRecord):
            is_new = record.id not in self._files
            self._files[record.id] = record
        else:
            is_new = record.id not in self._batches
            self._batches[record.id] = record
        if is_new:
            self._count(record, 1)

    def _remove(self, record: FileRecord | BatchRecord) -> None:
        self.folder.remove(record.id)
        known: dict[str, FileRecord] | dict[str, BatchRecord]
        known = self._files if isinstance(record, FileRecord) else self._batches
        del known[record.id]
        self._count(record, -1)

    def _count(self, record: FileRecord | BatchRecord, sign: int) -> None:
        self.quota.add_records(record.owner, sign)
        if isinstance(record, FileRecord):
            self.quota.add_bytes(record.owner, sign * record.num_bytes)


class Upload:
    """A file that is being uploaded. Owns its data from ``create`` until ``finish`` or ``abort``."""

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._id = new_id(FILE_PREFIX)
        self._num_bytes = 0
        self._descriptor: int | None = None

    def create(self) -> None:
        """Create the file. Raises PayloadTooLargeError if the folder is full, OSError."""
        quota = self._store.quota
        quota.check_records(self._owner)
        quota.check_bytes(self._owner)
        self._descriptor = self._store.disk.create(self._store.folder.data(self._id))
        quota.add_records(self._owner, 1)  # a running upload counts as a file

    def write(self, chunk: bytes) -> None:
        """Write the next bytes. Raises PayloadTooLargeError, OSError."""
        limit = self._store.limits.file_bytes
        if self._num_bytes + len(chunk) > limit:
            raise PayloadTooLargeError(
                f"the file has more than {limit} bytes, the limit of this service (files_max_bytes)",
                param="file",
            )
        self._store.quota.check_bytes(self._owner, len(chunk))
        self._store.disk.write(self._open, chunk)
        self._num_bytes += len(chunk)
        self._store.quota.add_bytes(self._owner, len(chunk))

    def finish(self, filename: str, seconds: int | None) -> FileRecord:
        """Add the record of the file and return it. Raises OSError."""
        store = self._store
        store.disk.sync(self._open)
        file = store.add_file(self._id, self._owner, self._num_bytes, filename, Purpose.BATCH, seconds)
        self._release()
        return file

    def abort(self) -> None:
        """Remove the data, unless the upload is finished or was not created. Raises OSError."""
        if self._descriptor is not None:
            self._release()
            self._store.folder.remove(self._id)

    @property
    def _open(self) -> int:
        if self._descriptor is None:
            raise AssertionError("the upload is not open")
        return self._descriptor

    def _release(self) -> None:
        os.close(self._open)
        self._descriptor = None
        self._store.quota.add_bytes(self._owner, -self._num_bytes)
        self._store.quota.add_records(self._owner, -1)
