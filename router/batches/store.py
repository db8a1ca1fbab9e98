"""The files and batches of all clients in the folder, within the limits of the folder and of each API key.

Every method blocks and is called on the thread of ``Storage``, so no two calls overlap. Each call names the owner; the
objects of other owners are not found.
"""

import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import BinaryIO

from contract.errors import InvalidRequestError, NotFoundError, OverloadedError, PayloadTooLargeError
from router.batches.folder import BATCH_PREFIX, FILE_PREFIX, Disk, Folder
from router.batches.records import BatchRecord, FileRecord, Purpose


@dataclass(frozen=True, kw_only=True)
class FolderLimits:
    """Limits of the folder.

    file_bytes: of one file. total_bytes: of all files. count: of files and batches. key_share: the part of total_bytes,
    count and open_batches that one API key may use. retention_seconds: how long files and batches are kept. batch_lines,
    line_bytes: of one input file.
    """

    file_bytes: int
    total_bytes: int
    count: int
    open_batches: int
    key_share: float
    retention_seconds: int
    batch_lines: int
    line_bytes: int

    def owner_share(self, limit: int, owner: str) -> int:
        """Return the part of ``limit`` that ``owner`` may use; without API keys ("") all of it."""
        return max(1, int(limit * self.key_share)) if owner else limit


class Quota:
    """Owns the counts of bytes and of records, by owner."""

    def __init__(self, limits: FolderLimits) -> None:
        self._limits = limits
        self._bytes: Counter[str] = Counter()
        self._records: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, of running uploads, and of the results of open batches."""
        return self._bytes.total()

    def add_bytes(self, owner: str, num_bytes: int) -> None:
        """Count bytes that were written, or with a negative number removed."""
        self._bytes[owner] += num_bytes

    def add_records(self, owner: str, number: int) -> None:
        """Count records that were written, or with a negative number removed."""
        self._records[owner] += number

    def check_bytes(self, owner: str, more: int = 1) -> None:
        """Raise PayloadTooLargeError unless ``owner`` may write ``more`` bytes."""
        limit = self._limits.total_bytes
        self._check("bytes", self._bytes, owner, more, limit, "files_total_bytes")

    def has_bytes(self, owner: str) -> bool:
        """Return True if ``owner`` may write at least one more byte."""
        limit = self._limits.total_bytes
        return self.num_bytes < limit and self._bytes[owner] < self._limits.owner_share(limit, owner)

    def check_records(self, owner: str, more: int = 1) -> None:
        """Raise PayloadTooLargeError unless ``owner`` may have ``more`` additional files and batches."""
        self._check("files and batches", self._records, owner, more, self._limits.count, "files_max_count")

    def check_open_batches(self, owner: str, num_open: int, num_own: int) -> None:
        """Raise OverloadedError unless ``owner``, with ``num_own`` of the ``num_open`` batches, may have one more."""
        limit = self._limits.open_batches
        own_limit = self._limits.owner_share(limit, owner)
        if num_open < limit and num_own < own_limit:
            return
        raise OverloadedError(
            f"{num_open} batches are open, {num_own} of this API key; the limits are {limit} and {own_limit} "
            "(batches_max_open, files_key_share); try again when one is over, or cancel one"
        )

    def _check(
        self, things: str, held: Counter[str], owner: str, more: int, limit: int, setting: str
    ) -> None:
        own_limit = self._limits.owner_share(limit, owner)
        if held.total() + more <= limit and held[owner] + more <= own_limit:
            return
        raise PayloadTooLargeError(
            f"this service keeps {limit} {things} at most ({setting}), {own_limit} of one API key; there are "
            f"{held.total()}, {held[owner]} of this one: delete files that you no longer need",
            code="storage_full",
        )


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
        # the results of open batches have data but no record yet
        results = [
            name for batch in self.open_batches() for name in (batch.output_file_id, batch.error_file_id)
        ]
        self.folder.remove_leftovers({*self._files, *results})
        self.sweep()

    def close(self) -> None:
        """Unlock the folder."""
        self.folder.close()

    def sweep(self) -> None:
        """Remove expired files, and batches that are over and older than the retention time. Raises OSError."""
        now = self.now
        used = self._inputs_in_use()
        # the input of an open batch is read again after a restart, so it stays although it has expired
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
        # another client's file is answered like one that does not exist, so that ids cannot be tried out
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
        # the router may have died between this record and that of the batch
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
        # at each piece: the size of a form's file is not known before its end
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


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed: 128 random bits."""
    return f"{prefix}{secrets.token_hex(16)}"
