"""The operations on batches in the folder: create, validate, add results, end; and the thread on which they run.

The operations block, like those of ``Store``. Coroutines call both through ``Storage``.
"""

import asyncio
import io
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, ParamSpec, TypeVar

from msgspec import structs

from contract.errors import InvalidRequestError, UnavailableError
from router.batches import lifecycle
from router.batches.folder import BATCH_PREFIX, FILE_PREFIX
from router.batches.lines import InputLine, Problem, Result, Results, Validation, new_result, valid_lines
from router.batches.records import BatchRecord, BatchStatus, Counts, Purpose
from router.batches.store import Store, new_id

P = ParamSpec("P")
T = TypeVar("T")
WINDOW_SECONDS = 24 * 3600
"""OpenAI's only completion window, 24h."""
_EXPIRED = Problem(
    "batch_expired", "This request could not be executed before the completion window expired."
)


@dataclass(frozen=True, kw_only=True)
class NewBatch:
    """The batch that a client creates. output_seconds: how long the result files are kept; None: as long as all files."""

    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    output_seconds: int | None


class BatchOperations:
    """Owns the result files of the open batches."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._results: dict[str, Results] = {}

    def create(self, new: NewBatch) -> BatchRecord:
        """Store a new batch. Raises NotFoundError, InvalidRequestError, OverloadedError, PayloadTooLargeError, OSError."""
        store = self._store
        # files that have expired must not count against the quota of the new batch
        store.sweep()
        file = store.file(new.owner, new.input_file_id, param="input_file_id")
        if file.purpose is not Purpose.BATCH:
            raise InvalidRequestError(
                f"{file.id} has the purpose {file.purpose}; the input of a batch has the purpose batch",
                param="input_file_id",
            )
        num_open = store.open_batches()
        num_own = sum(batch.owner == new.owner for batch in num_open)
        store.quota.check_open_batches(new.owner, len(num_open), num_own)
        store.quota.check_records(new.owner, 3)  # its record and its two result files
        now = store.now
        return store.put_batch(
            BatchRecord(
                id=new_id(BATCH_PREFIX),
                owner=new.owner,
                sequence=store.next_sequence(),
                endpoint=new.endpoint,
                input_file_id=file.id,
                completion_window=new.completion_window,
                output_file_id=new_id(FILE_PREFIX),
                error_file_id=new_id(FILE_PREFIX),
                created_at=now,
                expires_at=now + WINDOW_SECONDS,
                metadata=new.metadata,
                output_seconds=new.output_seconds,
            )
        )

    def show(self, batch: BatchRecord) -> BatchRecord:
        """Return the record with the counts of this moment."""
        results = self._results.get(batch.id)
        if results is None:
            return batch
        counts = Counts(batch.counts.total, results.num_answers, results.num_errors)
        return structs.replace(batch, counts=counts)

    def cancel(self, owner: str, batch_id: str) -> BatchRecord:
        """Begin to cancel a batch. Raises NotFoundError, InvalidRequestError if it is over, OSError."""
        batch = self._store.batch(owner, batch_id)
        if batch.status is BatchStatus.CANCELLING:
            return batch
        if not lifecycle.can_cancel(batch):
            raise InvalidRequestError(
                f"Cannot cancel a batch with status '{batch.status}'.", param="batch_id"
            )
        return self._store.put_batch(lifecycle.cancel(batch, self._store.now))

    def change(
        self, batch: BatchRecord, transition: Callable[[BatchRecord, int], BatchRecord]
    ) -> BatchRecord:
        """Apply a transition to the current record and store the result. Raises WrongStateError, OSError."""
        current = self._store.batch(batch.owner, batch.id)
        return self._store.put_batch(transition(current, self._store.now))

    def current(self, batch: BatchRecord) -> BatchRecord:
        """Return the current record."""
        return self._store.batch(batch.owner, batch.id)

    def seconds_left(self, batch: BatchRecord) -> int:
        """Return the remaining seconds of the completion window; 0 once it is over."""
        return max(0, batch.expires_at - self._store.now)

    def open_input(self, batch: BatchRecord) -> BinaryIO:
        """Open the input file. Raises OSError."""
        return self._store.folder.data(batch.input_file_id).open("rb")

    def validation(self, batch: BatchRecord, file: BinaryIO) -> Validation:
        """Return a validation of the input file, which has just been opened."""
        limits = self._store.limits
        return Validation(file, batch.endpoint, limits.batch_lines, limits.line_bytes)

    def lines(self, batch: BatchRecord, file: BinaryIO) -> Iterator[InputLine]:
        """Yield the lines that have no result yet from the input file, which has just been opened."""
        results = self._results[batch.id]
        for line in valid_lines(file, batch.endpoint, self._store.limits.line_bytes):
            if not results.has(line.custom_id):
                yield line

    def open_results(self, batch: BatchRecord) -> None:
        """Open the result files of a batch; those of an earlier run are continued. Raises OSError."""
        if batch.id in self._results:
            return
        data = self._store.folder.data
        results = Results(self._store.disk, data(batch.output_file_id), data(batch.error_file_id))
        self._results[batch.id] = results
        # results of an earlier run have no record yet, by which they would have been counted at the start
        self._store.quota.add_bytes(batch.owner, sum(results.sizes))

    def has_room(self, batch: BatchRecord) -> bool:
        """Return True if the quota of the owner has room for another result."""
        return self._store.quota.has_bytes(batch.owner)

    def append(self, batch: BatchRecord, result: Result) -> None:
        """Write a result. Raises OSError."""
        self._store.quota.add_bytes(batch.owner, self._results[batch.id].append(result))

    def append_expired(self, batch: BatchRecord, lines: Iterator[InputLine], max_lines: int) -> int:
        """Write an expiry error for up to ``max_lines`` of the lines, and return how many it were. Raises OSError."""
        late = list(islice(lines, max_lines))
        for line in late:
            self.append(batch, new_result(line.custom_id, None, _EXPIRED))
        return len(late)

    def end(self, batch: BatchRecord) -> BatchRecord:
        """Turn the results into files and end the batch. Raises OSError; it can be called again then."""
        self.open_results(batch)
        results = self._results[batch.id]
        results.sync()
        for file_id, num_bytes, name in zip(
            (batch.output_file_id, batch.error_file_id), results.sizes, ("output", "error"), strict=True
        ):
            if num_bytes:
                file_name = f"{batch.id}_{name}.jsonl"
                purpose = Purpose.BATCH_OUTPUT
                seconds = batch.output_seconds
                self._store.add_file(file_id, batch.owner, num_bytes, file_name, purpose, seconds)
            else:
                self._store.folder.remove(file_id)
        counts = Counts(batch.counts.total, results.num_answers, results.num_errors)
        ended = self.change(batch, partial(lifecycle.end, counts=counts))
        self.close_results(batch)
        return ended

    def close_results(self, batch: BatchRecord) -> None:
        """Close the result files of a batch. Does nothing if they are not open."""
        results = self._results.pop(batch.id, None)
        if results is not None:
            results.close()
            self._store.quota.add_bytes(batch.owner, -sum(results.sizes))

    def check_integrity(self) -> None:
        """Raise AssertionError if the counts differ from the content of the folder."""
        files = sum(self._store.folder.data(file.id).stat().st_size for file in self._store.all_files())
        results = sum(sum(results.sizes) for results in self._results.values())
        assert self._store.quota.num_bytes == files + results
        for file in self._store.all_files():
            assert self._store.folder.data(file.id).stat().st_size == file.num_bytes


class Storage:
    """Owns the thread. Call ``store`` and ``operations`` through ``run`` only, so that no two calls overlap."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.operations = BatchOperations(store)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="files")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of ``work``, called on the thread in order of arrival.

        If the caller is cancelled, the call is still made, and a file that it opens is closed. Raises the errors of
        ``work``, with UnavailableError in place of OSError.
        """
        call = self._thread.submit(partial(work, *args, **kwargs))
        try:
            return await asyncio.shield(asyncio.wrap_future(call))
        except asyncio.CancelledError:
            # the thread has begun the call and cannot be stopped; what it opens has no owner any more
            call.add_done_callback(_close)
            raise
        except OSError as error:
            raise UnavailableError(
                f"the folder of files cannot be used: {error.strerror or error}", code="storage_unavailable"
            ) from error

    async def open(self) -> None:
        """Lock and read the folder. Raises SettingError, UnavailableError."""
        await self.run(self.store.open)

    async def close(self) -> None:
        """Unlock the folder after all earlier calls."""
        await self.run(self.store.close)
        self._thread.shutdown(wait=False)


def _close(call: "Future[Any]") -> None:
    """Close the file that a call has opened for a cancelled caller."""
    if not call.cancelled() and call.exception() is None and isinstance(opened := call.result(), io.IOBase):
        opened.close()
