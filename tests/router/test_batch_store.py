"""The folder of files and batches with crashes at any write: acknowledged changes stay, and nothing is duplicated."""

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from contract.errors import InvalidRequestError, NotFoundError
from router.batches import lifecycle
from router.batches.folder import Folder
from router.batches.lifecycle import WrongStateError
from router.batches.lines import Response, new_result
from router.batches.operations import BatchOperations, NewBatch
from router.batches.records import BatchRecord, BatchStatus, Counts
from router.batches.store import FolderLimits, Store, Upload
from tests.fakes.router.crashing_disk import CrashingDisk, ProcessDiedError
from tests.router.batch_cluster import TEXT, prompts

T = TypeVar("T")
OWNERS = ("a", "b")
LIMITS = FolderLimits(
    file_bytes=10_000,
    total_bytes=100_000,
    count=1000,
    open_batches=100,
    key_share=1.0,
    retention_seconds=100_000,
    batch_lines=10,
    line_bytes=1000,
)
ORDER = {
    BatchStatus.VALIDATING: 0,
    BatchStatus.IN_PROGRESS: 1,
    BatchStatus.CANCELLING: 2,
    BatchStatus.FINALIZING: 2,
}
"""The rank of each status; one that is not listed is the last."""


@dataclass
class Known:
    """The acknowledged state of one batch. results: custom_ids whose line was written."""

    owner: str
    num_lines: int
    status: BatchStatus
    results: set[str] = field(default_factory=set)


class Filing(RuleBasedStateMachine):
    """A state machine: two owners, a folder, and a process that may die at any change of the disk."""

    files, batches = Bundle("files"), Bundle("batches")
    crashes = st.sampled_from([None, None, None, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 12])

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.TemporaryDirectory()
        self.now = 1_000_000.0
        self.contents: dict[str, tuple[str, bytes]] = {}
        self.known: dict[str, Known] = {}
        self.open()

    def open(self) -> None:
        self.disk = CrashingDisk()
        self.folder = Folder(Path(self.root.name) / "files", self.disk)
        self.store = Store(self.folder, self.disk, LIMITS, lambda: self.now)
        self.operations = BatchOperations(self.store)
        self.store.open()
        for batch in self.store.open_batches():
            if batch.status is not BatchStatus.VALIDATING:
                self.operations.open_results(batch)

    def do(self, crash: int | None, work: Callable[[], T]) -> T | None:
        """Return the result of ``work``, during which the process may die; None if it died and was restarted."""
        self.disk.crash_at = crash
        try:
            return work()
        except ProcessDiedError:
            for batch in self.store.open_batches():
                self.operations.close_results(batch)
            self.store.close()
            self.open()
            return None
        finally:
            self.disk.crash_at = None

    def batch(self, batch_id: str) -> BatchRecord:
        return self.store.batch(self.known[batch_id].owner, batch_id)

    @initialize(target=batches, size=st.integers(2, 6))
    def start(self, size: int) -> str:
        return self.created(self.uploaded(OWNERS[0], size, None), None)

    @precondition(lambda self: len(self.contents) < 3)
    @rule(target=files, owner=st.sampled_from(OWNERS), size=st.integers(1, 6), crash=crashes)
    def upload(self, owner: str, size: int, crash: int | None) -> str:
        return self.uploaded(owner, size, crash)

    def uploaded(self, owner: str, size: int, crash: int | None) -> str:
        content = prompts(size)

        def work() -> str:
            upload = Upload(self.store, owner)
            upload.create()
            for place in range(0, len(content), 100):
                upload.write(content[place : place + 100])
            return upload.finish("in.jsonl", None).id

        file_id = self.do(crash, work)
        if file_id is None:
            return self.uploaded(owner, size, None)
        self.contents[file_id] = (owner, content)
        return file_id

    @rule(file_id=files, crash=crashes)
    def delete(self, file_id: str, crash: int | None) -> None:
        if file_id not in self.contents:
            return
        owner, _ = self.contents[file_id]
        try:
            self.do(crash, lambda: self.store.delete_file(owner, file_id))
        except InvalidRequestError:
            assert any(batch.input_file_id == file_id for batch in self.store.open_batches())
            return
        if all(file.id != file_id for file in self.store.files(owner)):
            del self.contents[file_id]

    @precondition(lambda self: len(self.known) < 5)
    @rule(target=batches, file_id=files, crash=crashes)
    def create(self, file_id: str, crash: int | None) -> str:
        return self.created(file_id, crash)

    def created(self, file_id: str, crash: int | None) -> str:
        if file_id not in self.contents:
            file_id = self.uploaded(OWNERS[0], 2, None)
        owner, content = self.contents[file_id]
        new = NewBatch(
            owner=owner,
            endpoint=TEXT,
            input_file_id=file_id,
            completion_window="24h",
            metadata=None,
            output_seconds=None,
        )
        before = {batch.id for batch in self.store.batches(owner)}
        batch = self.do(crash, lambda: self.operations.create(new))
        if batch is None:
            for other in self.store.batches(owner):  # the batch was stored without an acknowledgement
                if other.id not in before:
                    self.known[other.id] = Known(owner, content.count(b"\n"), BatchStatus.VALIDATING)
            batch = self.operations.create(new)
        self.known[batch.id] = Known(owner, content.count(b"\n"), BatchStatus.VALIDATING)
        return batch.id

    @rule(batch_id=batches, steps=st.lists(st.booleans(), min_size=1, max_size=8), crash=crashes)
    def advance(self, batch_id: str, steps: list[bool], crash: int | None) -> None:
        """Continue a batch as a router does. steps: True for an answered request; the process may die in the last one."""
        for number, is_answer in enumerate(steps, 1):
            dies = crash if number == len(steps) else None
            batch = self.batch(batch_id)
            if batch.status is BatchStatus.VALIDATING:
                self.begin(batch_id, dies)
            elif batch.status is BatchStatus.IN_PROGRESS and len(self.lines(batch)) < batch.counts.total:
                self.answer(batch_id, is_answer, None if dies is None else 0)  # it is one write
            else:
                self.finish(batch_id, dies)

    def begin(self, batch_id: str, crash: int | None) -> None:
        batch = self.batch(batch_id)
        if batch.status is not BatchStatus.VALIDATING:
            with pytest.raises(WrongStateError):
                lifecycle.begin(batch, 1, 1)
            return

        def work() -> BatchRecord:
            with self.operations.open_input(batch) as file:
                validation = self.operations.validation(batch, file)
                while not validation.advance(50):
                    pass
                assert not validation.problems
                begun = self.operations.change(
                    batch, lambda b, now: lifecycle.begin(b, validation.total, now)
                )
            self.operations.open_results(begun)
            return begun

        begun = self.do(crash, work)
        assert begun is None or begun.counts == Counts(self.known[batch_id].num_lines)

    def answer(self, batch_id: str, is_answer: bool, crash: int | None) -> None:
        batch = self.batch(batch_id)
        if batch.status is not BatchStatus.IN_PROGRESS:
            return
        with self.operations.open_input(batch) as file:
            line = next(self.operations.lines(batch, file), None)
        known = self.known[batch_id]
        if line is None:
            assert len(known.results) == known.num_lines
            return
        assert line.custom_id not in known.results
        response = Response(200 if is_answer else 400, "cmpl-1", msgspec.Raw(b'{"a":1}'))
        result = new_result(line.custom_id, response)

        def work() -> bool:
            self.operations.append(batch, result)
            return True

        if self.do(crash, work):
            known.results.add(line.custom_id)

    def finish(self, batch_id: str, crash: int | None) -> None:
        batch, known = self.batch(batch_id), self.known[batch_id]
        if batch.status is BatchStatus.IN_PROGRESS and len(self.lines(batch)) == known.num_lines:
            self.do(crash, lambda: self.operations.change(batch, lifecycle.finalize))
        elif batch.status in (BatchStatus.FINALIZING, BatchStatus.CANCELLING):
            self.do(crash, lambda: self.end(batch))

    @rule(batch_id=batches, crash=crashes)
    @precondition(lambda self: len(self.known) > 1)
    def cancel(self, batch_id: str, crash: int | None) -> None:
        batch, known = self.batch(batch_id), self.known[batch_id]
        for other in OWNERS:
            if other != known.owner:
                with pytest.raises(NotFoundError):
                    self.operations.cancel(other, batch_id)
        if lifecycle.can_cancel(batch) or batch.status is BatchStatus.CANCELLING:
            self.do(crash, lambda: self.operations.cancel(known.owner, batch_id))
        else:
            with pytest.raises(InvalidRequestError, match="Cannot cancel"):
                self.operations.cancel(known.owner, batch_id)

    @rule(batch_id=batches, crash=crashes)
    @precondition(lambda self: len(self.known) > 2)
    def expire(self, batch_id: str, crash: int | None) -> None:
        batch = self.batch(batch_id)
        if batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            self.do(crash, lambda: self.operations.change(batch, lifecycle.expire))

    @rule(crash=crashes)
    def restart(self, crash: int | None) -> None:
        """End the process in order, or let it die in the clean-up of the next start."""
        for batch in self.store.open_batches():
            self.operations.close_results(batch)
        self.store.close()
        disk = CrashingDisk()
        disk.crash_at = crash
        folder = Folder(Path(self.root.name) / "files", disk)
        try:
            Store(folder, disk, LIMITS, lambda: self.now).open()
        except ProcessDiedError:
            pass
        finally:
            folder.close()
        self.open()

    def end(self, batch: BatchRecord) -> BatchRecord:
        if batch.is_expiring and batch.counts.total:
            with self.operations.open_input(batch) as file:
                lines = self.operations.lines(batch, file)
                while self.operations.append_expired(batch, lines, 2):
                    pass
        return self.operations.end(batch)

    def lines(self, batch: BatchRecord) -> list[str]:
        """Return the custom_ids of all whole result lines."""
        found = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            path = self.folder.data(file_id)
            if path.exists():
                found += [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]
        return found

    @invariant()
    def files_are_as_they_were_sent(self) -> None:
        for file_id, (owner, content) in self.contents.items():
            with self.store.open_file(self.store.file(owner, file_id)) as file:
                assert file.read() == content
            for other in OWNERS:
                if other != owner:
                    with pytest.raises(NotFoundError):
                        self.store.file(other, file_id)

    @invariant()
    def results_are_there_once(self) -> None:
        for batch_id, known in self.known.items():
            batch = self.batch(batch_id)
            lines = self.lines(batch)
            assert all(number == 1 for number in Counter(lines).values())
            assert known.results <= set(lines)
            known.results = set(lines)
            assert ORDER.get(known.status, 9) <= ORDER.get(batch.status, 9)
            known.status = batch.status
            if batch.status is BatchStatus.COMPLETED or (
                batch.status is BatchStatus.EXPIRED and batch.counts.total
            ):
                assert len(lines) == known.num_lines == batch.counts.total
            if not batch.is_open:
                assert batch.counts.completed + batch.counts.failed == len(lines)

    @invariant()
    def counts_are_those_of_the_folder(self) -> None:
        self.operations.check_integrity()

    def teardown(self) -> None:
        for batch in self.store.open_batches():
            self.operations.close_results(batch)
        self.store.close()
        self.root.cleanup()


Filing.TestCase.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestFiling = Filing.TestCase
