"""The limits on the content of the folder, in total and for each API key."""

from collections import Counter
from dataclasses import dataclass

from contract.errors import OverloadedError, PayloadTooLargeError


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
