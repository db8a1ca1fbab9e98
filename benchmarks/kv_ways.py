"""The ways to move blocks that are compared: memcpy, bare sockets, and this project's transports.

The sender runs in a separate process (``other_process``), which gets its orders through a pipe.
"""

import ctypes
import mmap
import multiprocessing
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from benchmarks.kv_pools import LEASE, Job, Shape, Way, job_of
from engine.kv_cache.memory import MappedKVMemory
from engine.mailbox import Mailbox
from kv_transfer.counters import Completions, Counters
from kv_transfer.data.data_half import DataHalf
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.digests import digest_of
from kv_transfer.protocol.reads import LeaseName, RangeGrant, Read, ReadRequest, Source, blocks_per_piece
from kv_transfer.transports.block_views import address_of, write_views
from kv_transfer.transports.data_port import leave_unpaced
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.registry import open_transport
from kv_transfer.transports.transport import Senders, TransportContext, TransportSettings

_TOKEN = "token"
_WAIT_SECONDS = 60.0
_C_LOOP = """
#include <string.h>
void copy_blocks(char *to, const char *from, const long *to_ids, const long *from_ids, long count, long size) {
    for (long i = 0; i < count; i++) memcpy(to + to_ids[i] * size, from + from_ids[i] * size, size);
}
"""


def memcpy_in_python(job: Job) -> Way:
    """Copy in a loop over memoryviews, the fastest in Python (numpy, torch and ctypes cost more per block)."""
    size = job.shape.block_bytes

    def copy() -> None:
        source = job.source_view
        target = job.target.pool_view
        for source_id, target_id in zip(job.source_ids, job.target_ids, strict=True):
            target[target_id * size : (target_id + 1) * size] = source[
                source_id * size : (source_id + 1) * size
            ]

    return copy


def memcpy_in_c(job: Job, folder: Path) -> Way | None:
    """Copy in a C loop over the same lists, compiled now; None without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    code = folder / "copy.c"
    library = folder / "copy.so"
    code.write_text(_C_LOOP)
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(code)], check=True)
    copy_blocks = ctypes.CDLL(str(library)).copy_blocks
    target, source = (ctypes.c_void_p(address_of(view)) for view in (job.target.pool_view, job.source_view))
    ids = [array("l", block_ids) for block_ids in (job.target_ids, job.source_ids)]
    lists = [(ctypes.c_long * len(block_ids)).from_buffer(block_ids) for block_ids in ids]
    count = ctypes.c_long(job.shape.num_blocks)
    size = ctypes.c_long(job.shape.block_bytes)

    def copy() -> None:
        copy_blocks(target, source, *lists, count, size)

    return copy


@contextmanager
def over_transport(name: str, job: Job) -> Iterator[tuple[Way, Way]]:
    """Yield two ways: without digests (from request to received bytes), and with them (from pull order to verification).

    The lists of blocks are made in advance, as for the bare ways.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        other_process(_lend, name, job.shape, Path(folder), job.source_ids) as pipe,
    ):
        address = pipe.recv_bytes().decode()
        digests = array("Q", pipe.recv_bytes())
        job.grants = msgspec.msgpack.decode(pipe.recv_bytes(), type=tuple[RangeGrant, ...])
        job.lent = _mapped(pipe.recv_bytes().decode(), job.shape.num_bytes)
        where = Source("p", "sender", address, _TOKEN, name)
        opened = open_transport(name, _context("reader", Path(folder)))
        job.digests = tuple(digests)
        reports = _Reports()
        data = DataHalf(opened.receiver, Counters(), Completions(), [name])
        data.attach(Senders({name: opened.sender}), reports)
        data.start(job.target)

        request = ReadRequest(LEASE, 0, job.shape.num_blocks, job.grants)
        views = write_views(job.target, job.target_ids)

        def fetch() -> None:
            opened.receiver.fetch(where, request, views, Read())

        def pull() -> None:
            data.post_pull(job.pull(where))
            reports.expect_verified()

        try:
            yield fetch, pull
        finally:
            data.close()


@contextmanager
def over_transport_elsewhere(name: str, job: Job) -> Iterator[tuple[Way, Way]]:
    """Yield the same ways, with the reader in a separate process, which measures itself."""
    with other_process(_read, name, job.shape, is_parent=True) as pipe:

        def ask(word: str) -> float:
            pipe.send_bytes(word.encode())
            if not pipe.poll(_WAIT_SECONDS):
                raise AssertionError(f"{name}: no answer to {word}")
            return float(pipe.recv_bytes())

        for word in ("fetch", "check", "pull", "check"):
            ask(word)
        yield partial(ask, "fetch"), partial(ask, "pull")
        ask("check")


def _read(pipe: Connection, name: str, shape: Shape) -> None:
    """Run the reader's process: it runs the orders and answers with their seconds."""
    torch.set_num_threads(1)
    job = job_of(shape)
    with over_transport(name, job) as (fetch, pull), suppress(EOFError):
        do: dict[bytes, Callable[[], object]] = {
            b"fetch": fetch,
            b"pull": pull,
            b"check": lambda: job.check(name),
        }
        while True:
            work = do[pipe.recv_bytes()]
            begin = time.perf_counter()
            work()
            pipe.send_bytes(str(time.perf_counter() - begin).encode())


def _mapped(path: str, num_bytes: int) -> memoryview:
    """Map the shared pool of another process."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return memoryview(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ))
    finally:
        os.close(descriptor)


class _Reports:
    """Receives the reports of a data half; see ``kv_transfer.data.threads.DataReports``."""

    def __init__(self) -> None:
        self._ends = Mailbox[object]()

    def expect_verified(self) -> None:
        """Wait for the running pull to be verified. Raises AssertionError for another end."""
        end = self._ends.get(_WAIT_SECONDS)
        if not isinstance(end, ev.PieceVerified):
            raise AssertionError(f"a pull ended with {end}")

    def fetch_event(self, key: str, event: ev.FetchEvent) -> None:
        """Record the progress or the end of a pull."""
        if not isinstance(event, ev.PieceLanded):
            self._ends.put(event)

    def send_event(self, key: str, event: ev.SendEvent) -> None:
        """Ignore the report: this process sends nothing."""

    def end_expected(self, key: str, seconds: float) -> None:
        """Do nothing: no estimate is sent."""

    def lease_idle(self, name: LeaseName) -> None:
        """Ignore the report: this process sends nothing."""

    def thread_failed(self, thread: str, error: BaseException) -> None:
        """Record the error, which is a bug."""
        self._ends.put(error)


@contextmanager
def over_bare_sockets(job: Job, *, is_unpaced: bool = False) -> Iterator[Way]:
    """Send each piece of the same size with one ``sendmsg`` and one ``recvmsg_into``, without messages or checks.

    The views are made in advance. It is the fastest variant found: both ends wait in the kernel (``MSG_WAITALL``).
    is_unpaced: with ``leave_unpaced``; else with the system's defaults.
    """
    pieces = _pieces(job.target, job.target_ids)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with (
            other_process(_send_bare, job.shape, address, job.source_ids, is_unpaced),
            listener.accept()[0] as sock,
        ):
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(_WAIT_SECONDS), 0))

            def fetch() -> None:
                sock.sendall(b"g")
                for piece in pieces:
                    _receive(sock, piece)

            yield fetch


def _receive(sock: socket.socket, piece: list[memoryview]) -> None:
    wanted = sum(map(len, piece))
    while wanted:
        count = sock.recvmsg_into(piece, 0, socket.MSG_WAITALL)[0]
        assert count, "the sender is gone"
        wanted -= count
        piece = _after(piece, count) if wanted else []


def _send_bare(
    pipe: Connection, shape: Shape, address: tuple[str, int], order: list[int], is_unpaced: bool
) -> None:
    """Run the sender's process: it sends all blocks for each received byte."""
    pieces = _pieces(shape.source_pool(), order)
    with socket.create_connection(address) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_unpaced:
            leave_unpaced(sock)
        sock.settimeout(None)
        while sock.recv(1):
            for piece in pieces:
                wanted = sum(map(len, piece))
                while wanted:
                    count = sock.sendmsg(piece)
                    wanted -= count
                    piece = _after(piece, count) if wanted else []


def _pieces(memory: MappedKVMemory, block_ids: Sequence[int]) -> list[list[memoryview]]:
    """Return the blocks' views, divided into pieces like a read of the ``tcp`` transport."""
    views = list(write_views(memory, block_ids))
    step = blocks_per_piece(memory.layout.block_bytes)
    return [views[start : start + step] for start in range(0, len(views), step)]


def _after(piece: list[memoryview], count: int) -> list[memoryview]:
    for position, view in enumerate(piece):
        if count < len(view):
            return [view[count:], *piece[position + 1 :]]
        count -= len(view)
    return []


@contextmanager
def other_process(
    work: Callable[..., None], *arguments: object, is_parent: bool = False
) -> Iterator[Connection]:
    """Run ``work(its end of a pipe, *arguments)`` in a process, which ends when the pipe is closed.

    is_parent: it starts child processes.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=work, args=(theirs, *arguments), daemon=not is_parent)
    process.start()
    theirs.close()
    try:
        with ours:
            yield ours
    finally:
        process.join(_WAIT_SECONDS)


def _lend(pipe: Connection, transport: str, shape: Shape, folder: Path, order: list[int]) -> None:
    """Run the sender's process of a transport, with all blocks under one lease.

    Sends its address, the digests, the grants, and the path of its pool.
    """
    sender = open_transport(transport, _context("sender", folder)).sender
    lending = Senders({transport: sender})
    memory = shape.source_pool()
    lending.start(memory)
    step = blocks_per_piece(shape.block_bytes)
    grants = [
        RangeGrant(
            start, len(order[start : start + step]), dict(lending.publish(LEASE, order[start : start + step]))
        )
        for start in range(0, len(order), step)
    ]
    pipe.send_bytes(sender.address.encode())
    pipe.send_bytes(array("Q", digests(memory, order)).tobytes())
    pipe.send_bytes(msgspec.msgpack.encode(grants))
    pipe.send_bytes(f"/proc/{os.getpid()}/fd/{memory.memfd}".encode())
    try:
        pipe.recv_bytes()
    except EOFError:
        lending.close()


def digests(memory: MappedKVMemory, block_ids: Sequence[int]) -> list[int]:
    """Return the digests that a sender announces; block i of the lease is seeded with i."""
    return [digest_of(memory.read_view(block_id), index) for index, block_id in enumerate(block_ids)]


def _context(boot_id: str, folder: Path) -> TransportContext:
    sessions = Sessions()
    sessions.begin(_TOKEN)
    settings = TransportSettings(boot_id=boot_id, read_timeout_seconds=_WAIT_SECONDS, shm_dir=folder)
    return TransportContext(settings, sessions, lambda _: None)
