"""How fast KV blocks cross by each transport between two workers on one machine, beside a plain memcpy.

Run ``python -m benchmarks.kv_copy`` on an idle machine. The sender has a process of its own. Blocks are taken in random
order. Printed are the best, the median and the first of several rounds in GB/s (the first faults pages in), and the
ratio of the medians to a memcpy between two pools of this process.
"""

import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from contract.layout import KVLayout
from kv_transfer.leases import Sessions
from kv_transfer.testing import ByteMemory
from kv_transfer.transport import LeaseName, Read, ReadRequest, Source
from kv_transfer.transports.context import TransportContext
from kv_transfer.transports.registry import open_transport

_SHAPES = ((256, 32 * 1024), (4096, 16 * 1024))
_NUM_ROUNDS = 15
_NAME = LeaseName("t", 0, "lease")


def main() -> None:
    """Print one JSON line per transport and shape."""
    for num_blocks, block_bytes in _SHAPES:
        layout = KVLayout(
            num_layers=1, num_kv_heads=1, head_dim=block_bytes // 128, block_size=16, dtype="float32"
        )
        assert layout.block_bytes == block_bytes
        source, target = ByteMemory(layout, num_blocks), ByteMemory(layout, num_blocks)
        for block_id in range(num_blocks):
            source.fill(block_id, b"kv" + block_id.to_bytes(4, "little"))
            target.fill(block_id, b"-")
        order = random.Random(1).sample(range(num_blocks), num_blocks)
        views = [target.write_view(block_id) for block_id in reversed(range(num_blocks))]
        results = {"memcpy": _rounds(partial(_memcpy, source, order, views))}
        for transport in ("shm", "tcp"):
            results[transport] = _over(transport, layout, order, views)
        for name, (first, seconds) in results.items():
            _report(name, num_blocks, block_bytes, first, seconds, results["memcpy"][1])


def _memcpy(source: ByteMemory, order: list[int], views: list[memoryview]) -> None:
    for block_id, view in zip(order, views, strict=True):
        view[:] = source.read_view(block_id)


def _over(
    transport: str, layout: KVLayout, order: list[int], views: list[memoryview]
) -> tuple[float, list[float]]:
    """The same copies out of another process's pool."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory() as folder, ours:
        sender = spawn.Process(target=_lend, args=(transport, layout, order, Path(folder), theirs))
        sender.start()
        address = ours.recv_bytes().decode()
        opened = open_transport(transport, _context("reader", Path(folder)))
        where = Source("p", "sender", address, "token", transport)
        request = ReadRequest(_NAME, list(range(len(order))))
        try:
            return _rounds(lambda: opened.receiver.fetch(where, request, views, Read()))
        finally:
            opened.receiver.close()
            opened.sender.close()
            ours.send_bytes(b"done")
            sender.join()


def _lend(transport: str, layout: KVLayout, order: list[int], folder: Path, pipe: Connection) -> None:
    """The sender's process."""
    sender = open_transport(transport, _context("sender", folder)).sender
    memory = ByteMemory(layout, len(order))
    for block_id in order:
        memory.fill(block_id, b"kv" + block_id.to_bytes(4, "little"))
    sender.start(memory)
    sender.publish(_NAME, order)
    pipe.send_bytes(sender.address.encode())
    pipe.recv_bytes()
    sender.close()


def _context(boot_id: str, folder: Path) -> TransportContext:
    sessions = Sessions()
    sessions.begin("token")
    return TransportContext("127.0.0.1", None, 0, boot_id, 30.0, sessions, lambda _: None, shm_dir=folder)


def _rounds(work: Callable[[], None]) -> tuple[float, list[float]]:
    """(seconds of the first round, which faults pages in; seconds of the others)."""
    seconds = []
    for _ in range(_NUM_ROUNDS + 1):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return seconds[0], seconds[1:]


def _report(
    name: str, num_blocks: int, block_bytes: int, first: float, seconds: list[float], memcpy: list[float]
) -> None:
    gigabytes = num_blocks * block_bytes / 1e9
    median = statistics.median(seconds)
    line = {
        "transport": name,
        "num_blocks": num_blocks,
        "block_bytes": block_bytes,
        "gb_per_s_best": round(gigabytes / min(seconds), 2),
        "gb_per_s_median": round(gigabytes / median, 2),
        "gb_per_s_first": round(gigabytes / first, 2),
        "ratio_to_memcpy": round(statistics.median(memcpy) / median, 3),
    }
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
