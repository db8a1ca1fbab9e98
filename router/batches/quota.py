"""How much the folder may hold, of everybody together and of one API key."""

from collections import Counter
from dataclasses import dataclass

from contract.errors import OverloadedError, PayloadTooLargeError


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of the folder. key_share: of total_bytes, count and open_batches, the part that one API key may use.

    file_bytes: of one file. total_bytes: of all files. count: of files and batches. retention_seconds: how long both are
    kept. batch_lines, line_bytes: of one input file.
    """

    file_bytes: int
    total_bytes: int
    count: int
    open_batches: int
    key_share: float
    retention_seconds: int
    batch_lines: int
    line_bytes: int

    def of_owner(self, limit: int, owner: str) -> int:
        """Return the part of ``limit`` that ``owner`` may use; without API keys nobody shares it."""
        return max(1, int(limit * self.key_share)) if owner else limit


class Quota:
    """Owns the counts of bytes and of records, by owner."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._bytes: Counter[str] = Counter()
        self._records: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, of uploads that run, and of the results of open batches."""
        return self._bytes.total()

    def add_bytes(self, owner: str, num_bytes: int) -> None:
        """Count bytes that were written, or with a negative number such as were removed."""
        self._bytes[owner] += num_bytes

    def add_records(self, owner: str, number: int) -> None:
        """Count records that were written or, with a negative number, removed."""
        self._records[owner] += number

    def check_bytes(self, owner: str, more: int = 1) -> None:
        """Raise PayloadTooLargeError unless ``owner`` may write so many bytes more."""
        limit = self._bounds.total_bytes
        self._check("bytes", self._bytes, owner, more, limit, "files_total_bytes")

    def has_bytes(self, owner: str) -> bool:
        """Whether ``owner`` may write any byte more."""
        limit = self._bounds.total_bytes
        return self.num_bytes < limit and self._bytes[owner] < self._bounds.of_owner(limit, owner)

    def check_records(self, owner: str, more: int = 1) -> None:
        """Raise PayloadTooLargeError unless ``owner`` may have so many files and batches more."""
        self._check("files and batches", self._records, owner, more, self._bounds.count, "files_max_count")

    def check_open_batches(self, owner: str, num_open: int, num_own: int) -> None:
        """Raise OverloadedError unless ``owner``, who has ``num_own`` of the ``num_open`` batches, may have one more."""
        limit = self._bounds.open_batches
        own_limit = self._bounds.of_owner(limit, owner)
        if num_open < limit and num_own < own_limit:
            return
        raise OverloadedError(
            f"{num_open} batches are open, {num_own} of this API key; the limits are {limit} and {own_limit} "
            "(batches_max_open, files_key_share); create it again when one is over, or cancel one"
        )

    def _check(
        self, things: str, held: Counter[str], owner: str, more: int, limit: int, setting: str
    ) -> None:
        own_limit = self._bounds.of_owner(limit, owner)
        if held.total() + more <= limit and held[owner] + more <= own_limit:
            return
        raise PayloadTooLargeError(
            f"this service keeps {limit} {things} at most ({setting}), {own_limit} of one API key; there are "
            f"{held.total()}, {held[owner]} of this one: delete files that are not needed any more",
            code="storage_full",
        )
