"""The records of files and batches in the folder, one JSON file each."""

from enum import StrEnum

import msgspec

VERSION = 1
"""Version of the records' format; a record of another version is rejected by name."""


class Purpose(StrEnum):
    """The purpose of a file. Clients upload BATCH; the service writes BATCH_OUTPUT."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that is completely on the disk.

    owner: digest of the API key that it belongs to; "" without keys. sequence: grows with every record of the folder.
    num_bytes: of the content. filename: the client's name for it, never part of a path. created_at, expires_at: Unix
    seconds; the file is removed at ``expires_at``.
    """

    id: str
    owner: str
    sequence: int
    num_bytes: int
    filename: str
    purpose: Purpose
    created_at: int
    expires_at: int
    version: int = VERSION


class BatchStatus(StrEnum):
    """The states of a batch, by OpenAI's names."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OPEN = frozenset(
    {BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING}
)
"""The states of an open batch, one that is not over."""


class LineProblem(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why the input of a batch is rejected. line: number in the input file, from 1; None for the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of requests of a batch: total, answered, and ended with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A batch. Times are Unix seconds; the time of a state is None until the batch has reached that state.

    owner, sequence: see FileRecord. output_file_id, error_file_id: chosen when the batch is created, since results are
    written under these names from the first one on; clients see them once the batch is over. output_seconds: how long these
    files are kept; None: as long as all files. counts: final only when the batch is over. is_expiring: the requests that
    were not answered in time get an error line.
    """

    id: str
    owner: str
    sequence: int
    endpoint: str
    input_file_id: str
    completion_window: str
    output_file_id: str
    error_file_id: str
    created_at: int
    expires_at: int
    status: BatchStatus = BatchStatus.VALIDATING
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    is_expiring: bool = False
    counts: Counts = Counts()
    errors: tuple[LineProblem, ...] = ()
    version: int = VERSION

    @property
    def is_open(self) -> bool:
        """True while the batch is not over."""
        return self.status in OPEN
