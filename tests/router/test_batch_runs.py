"""One batch with a scripted answer and disk: retries, errors and waiting."""

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.errors import ErrorKind, PayloadTooLargeError, UnavailableError
from router.batches.folder import Disk, Folder
from router.batches.gate import LineGate
from router.batches.operations import NewBatch, Storage
from router.batches.records import BatchRecord, BatchStatus
from router.batches.run import LineAnswer
from router.batches.service import BatchRunner, BatchService
from router.batches.store import FolderLimits, Store, Upload
from tests.router.batch_cluster import TEXT, prompts

OK = LineAnswer(request_id="cmpl-1", status_code=200, body=b'{"object":"text_completion"}')
LIMITS = FolderLimits(
    file_bytes=10_000,
    total_bytes=100_000,
    count=100,
    open_batches=10,
    key_share=1.0,
    retention_seconds=1_000_000,
    batch_lines=100,
    line_bytes=1000,
)


def failed(kind: ErrorKind, status: int = 503, *, has_workers: bool = True) -> LineAnswer:
    return LineAnswer(
        request_id="cmpl-1", status_code=status, body=b'{"error":{}}', kind=kind, has_workers=has_workers
    )


class FullDisk(Disk):
    """A disk without space while ``is_full``; every second failing write has written its first half."""

    def __init__(self) -> None:
        self.is_full = False
        self.num_failures = 0

    def write(self, descriptor: int, data: bytes) -> None:
        if self.is_full:
            self.num_failures += 1
            if self.num_failures % 2:
                super().write(descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(descriptor, data)


@dataclass
class Bench:
    """A service of batches whose requests are answered from ``answers``; the last answer is repeated.

    pauses: the seconds of each pause; ``on_pause`` is called with them. results: counts by name.
    """

    folder: Path
    answers: list[LineAnswer] = field(default_factory=lambda: [OK])
    limits: FolderLimits = LIMITS
    disk: FullDisk = field(default_factory=FullDisk)
    has_begun: bool = False
    now: float = 1_000_000.0
    pauses: list[float] = field(default_factory=list)
    on_pause: Callable[[float], None] = lambda _: None
    results: dict[str, int] = field(default_factory=dict)
    num_asked: int = 0
    hold: asyncio.Event | None = None

    async def answer(
        self, endpoint: str, body: bytes, tenant: str, on_begun: Callable[[], None]
    ) -> LineAnswer:
        self.num_asked += 1
        assert (endpoint, tenant) == (TEXT, "me")
        assert msgspec.json.decode(body)["prompt"] == "x"
        if self.has_begun:
            on_begun()
        if self.hold:
            await self.hold.wait()
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.on_pause(seconds)
        await asyncio.sleep(0)

    def count(self, result: str, number: int) -> None:
        self.results[result] = self.results.get(result, 0) + number

    @asynccontextmanager
    async def service(self) -> AsyncIterator[BatchService]:
        service = BatchService(
            self.folder,
            self.limits,
            self.answer,
            max_concurrency=2,
            may_begin=lambda: True,
            count_result=self.count,
            clock=lambda: self.now,
            pause=self.pause,
            disk=self.disk,
        )
        await service.start()
        try:
            yield service
        finally:
            await service.close()


async def uploaded(service: BatchService, content: bytes) -> str:
    upload = Upload(service.storage.store, "me")
    try:
        await service.storage.run(upload.create)
        await service.storage.run(upload.write, content)
        return (await service.storage.run(upload.finish, "in.jsonl", None)).id
    finally:
        await service.storage.run(upload.abort)


async def created(service: BatchService, content: bytes) -> BatchRecord:
    file_id = await uploaded(service, content)
    return await service.runner.create(
        NewBatch(
            owner="me",
            endpoint=TEXT,
            input_file_id=file_id,
            completion_window="24h",
            metadata=None,
            output_seconds=None,
        )
    )


async def when(
    service: BatchService, batch: BatchRecord, is_true: Callable[[BatchRecord], object]
) -> BatchRecord:
    store, operations = service.storage.store, service.storage.operations
    async with asyncio.timeout(30):
        while True:
            current = await service.storage.run(lambda: operations.show(store.batch("me", batch.id)))
            if is_true(current):
                return current
            await asyncio.sleep(0.001)


async def over(service: BatchService, batch: BatchRecord) -> BatchRecord:
    return await when(service, batch, lambda current: not current.is_open)


async def lines(service: BatchService, file_id: str) -> list[Any]:
    store = service.storage.store
    path = store.folder.data(file_id)
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("kind", [ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE])
async def test_a_busy_service_is_retried_with_growing_pauses(tmp_path: Path, kind: ErrorKind) -> None:
    bench = Bench(tmp_path, answers=[*[failed(kind)] * 7, OK])
    async with bench.service() as service:
        batch = await over(service, await created(service, prompts(1)))
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 1)
    assert bench.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert bench.results == {"retried": 7, "completed": 1}


@pytest.mark.parametrize(
    ("answer", "has_begun", "num_asked"),
    [
        (failed(ErrorKind.DEADLINE, 504), False, 20),
        (failed(ErrorKind.DEADLINE, 504), True, 1),
        (failed(ErrorKind.WORKER_LOST, has_workers=False), True, 2),
        (failed(ErrorKind.WORKER_LOST), True, 1),
        (failed(ErrorKind.INVALID_REQUEST, 400), False, 1),
        (failed(ErrorKind.INTERNAL, 500), True, 1),
    ],
)
async def test_a_permanent_failure_is_an_error_line(
    tmp_path: Path, answer: LineAnswer, has_begun: bool, num_asked: int
) -> None:
    bench = Bench(tmp_path, answers=[answer], has_begun=has_begun)
    async with bench.service() as service:
        batch = await over(service, await created(service, prompts(1)))
        [line] = await lines(service, batch.error_file_id)
    assert (batch.status, batch.counts.failed, bench.num_asked) == (BatchStatus.COMPLETED, 1, num_asked)
    assert line["response"]["status_code"] == answer.status_code


async def test_a_full_disk_costs_no_result(tmp_path: Path) -> None:
    """The answer stays in memory until its line can be written; partial lines of failed writes are not visible."""
    bench = Bench(tmp_path)

    def free_at_the_fifth(_: float) -> None:
        bench.disk.is_full = len(bench.pauses) < 5

    async with bench.service() as service:
        bench.hold = asyncio.Event()
        made = await created(service, prompts(3))
        await when(
            service, made, lambda batch: batch.status is BatchStatus.IN_PROGRESS and bench.num_asked == 2
        )
        bench.disk.is_full, bench.on_pause = True, free_at_the_fifth
        bench.hold.set()
        batch = await over(service, made)
        found = await lines(service, batch.output_file_id)
    assert (batch.status, bench.num_asked) == (BatchStatus.COMPLETED, 3)
    assert sorted(line["custom_id"] for line in found) == ["r0", "r1", "r2"]
    assert bench.disk.num_failures >= 5


async def test_an_upload_to_a_full_disk_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.service() as service:
        bench.disk.is_full = True
        with pytest.raises(UnavailableError, match="No space left on device"):
            await uploaded(service, b"x" * 100)
        bench.disk.is_full = False
        await service.storage.run(service.storage.operations.check_integrity)
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        await uploaded(service, b"x")


async def test_batches_wait_while_the_folder_is_full(tmp_path: Path) -> None:
    content = prompts(3)
    limits = FolderLimits(
        **{**{f: getattr(LIMITS, f) for f in LIMITS.__dataclass_fields__}, "total_bytes": 1000}
    )
    bench = Bench(tmp_path, limits=limits)
    async with bench.service() as service:
        filler = await uploaded(service, b"x" * (1000 - len(content)))
        with pytest.raises(PayloadTooLargeError, match="files_total_bytes"):
            await uploaded(service, content + b"x")
        batch = await created(service, content)
        await when(service, batch, lambda current: current.status is BatchStatus.IN_PROGRESS)
        assert bench.num_asked == 0
        await service.runner.delete_file("me", filler)
        batch = await over(service, batch)
    assert (batch.status, bench.num_asked) == (BatchStatus.COMPLETED, 3)


async def test_a_batch_expires_while_it_runs(tmp_path: Path) -> None:
    """The clock is past the window when its timer fires: each unanswered request gets an error line."""
    bench = Bench(tmp_path)
    async with bench.service() as service:
        bench.hold = asyncio.Event()
        made = await created(service, prompts(3))
        await when(
            service, made, lambda batch: batch.status is BatchStatus.IN_PROGRESS and bench.num_asked == 2
        )
        bench.now += 24 * 3600
        service.runner.recheck(made.id)
        batch = await over(service, made)
        errors = await lines(service, batch.error_file_id)
    assert batch.status is BatchStatus.EXPIRED
    assert [line["custom_id"] for line in errors] == ["r0", "r1", "r2"]
    assert bench.results == {"expired": 3}


async def test_a_timer_that_fires_early_changes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.service() as service:
        bench.hold = asyncio.Event()
        made = await created(service, prompts(3))
        await when(
            service, made, lambda batch: batch.status is BatchStatus.IN_PROGRESS and bench.num_asked == 2
        )
        service.runner.recheck(made.id)
        await when(service, made, lambda _: bench.num_asked == 4)  # the same two begin once more
        bench.hold.set()
        batch = await over(service, made)
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 3)


async def test_a_batch_is_cancelled_before_it_is_validated(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.service() as service:
        made = await created(service, prompts(50))
        await service.runner.cancel("me", made.id)
        batch = await over(service, made)
        await service.storage.run(service.storage.operations.check_integrity)
    assert batch.status is BatchStatus.CANCELLED


class StuckDisk(Disk):
    """A disk whose first removal fails."""

    def __init__(self) -> None:
        self.num_tries = 0

    def remove(self, path: Path) -> None:
        self.num_tries += 1
        if self.num_tries == 1:
            raise OSError(errno.EIO, "Input/output error")
        super().remove(path)


async def test_old_files_are_removed_after_the_disk_failed_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """P2: one error of the disk ended the task that removes them, and the folder filled up."""
    seconds = [1000.0]
    storage = Storage(Store(Folder(tmp_path, Disk()), Disk(), LIMITS, lambda: seconds[0]))
    turns: asyncio.Queue[None] = asyncio.Queue()

    async def pause(_: float) -> None:
        await turns.get()

    runner = BatchRunner(
        storage,
        Bench(tmp_path).answer,
        LineGate(1, lambda: True),
        lambda _what, _number: None,
        sweep_pause=pause,
    )
    await storage.open()
    await runner.start()
    upload = Upload(storage.store, "")
    await storage.run(upload.create)
    await storage.run(upload.write, b"x")
    file = await storage.run(upload.finish, "a", 3600)
    seconds[0] += 3600
    storage.store.folder = Folder(tmp_path, disk := StuckDisk())
    turns.put_nowait(None)
    turns.put_nowait(None)
    async with asyncio.timeout(10):
        while (tmp_path / f"{file.id}.data").exists():
            await asyncio.sleep(0.01)
    assert disk.num_tries > 1 and "old files were not removed: " in caplog.text
    await runner.close()
    await storage.close()


async def test_a_file_that_is_opened_for_a_cancelled_caller_is_closed(tmp_path: Path) -> None:
    """H7: the caller may be cancelled while the disk opens its file."""
    storage = Storage(Store(Folder(tmp_path, Disk()), Disk(), LIMITS, lambda: 0.0))
    begun, rest = threading.Event(), threading.Event()
    opened = []

    def open_slowly() -> Any:
        begun.set()
        assert rest.wait(10)
        opened.append((tmp_path / "a").open("wb"))
        return opened[0]

    asking = asyncio.create_task(storage.run(open_slowly))
    await asyncio.to_thread(begun.wait, 10)
    asking.cancel()
    await asyncio.wait([asking])
    rest.set()
    assert await storage.run(lambda: len(opened)) == 1, "the calls are made in turn"
    assert opened[0].closed
    await storage.close()
