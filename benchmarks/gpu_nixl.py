"""Reads between the memory of two processes on one device by bare NIXL, as the ``nixl`` transport posts them.

The parent starts a reader for each case, and the reader its own sender. A case is the kind of memory on either side, and
whether UCX may read through CUDA IPC where it sees no NVLink (``UCX_CUDA_IPC_ENABLE_GET_ZCOPY``). The protocols that UCX
chose (its log, by ``UCX_PROTO_INFO``) are kept: a read that goes over ``tcp`` is not device to device.
"""

import base64
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.bare_nixl import BareAgent
from tests.chaos.settings import process_environment

_POLL_SECONDS = 0.0005
_NUM_ROUNDS = 12
_MAX_SECONDS = 45.0
_NUM_LAST_LINES = 30
_GET_ZCOPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"


@dataclass(frozen=True)
class ReadCase:
    """One measurement. source, target: "cuda" or "cpu". may_get: UCX may read through CUDA IPC without NVLink."""

    source: str
    target: str
    may_get: bool


def cases(device: torch.device) -> list[ReadCase]:
    """Return the cases for this device; on the CPU only host memory."""
    if device.type == "cpu":
        return [ReadCase("cpu", "cpu", may_get=False)]
    return [
        ReadCase("cuda", "cuda", may_get=True),
        ReadCase("cuda", "cuda", may_get=False),
        ReadCase("cuda", "cpu", may_get=True),
        ReadCase("cpu", "cpu", may_get=False),
    ]


def reads(device: torch.device, num_blocks: int, block_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each case; one that fails or hangs has its error in its row."""
    for case in cases(device):
        row = {"source": case.source, "target": case.target, "get_zcopy": case.may_get}
        row |= {"num_blocks": num_blocks, "block_bytes": block_bytes}
        yield row | _measured(case, num_blocks, block_bytes)


def _measured(case: ReadCase, num_blocks: int, block_bytes: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu_nixl", "reader", case.source, case.target]
    command += [str(num_blocks), str(block_bytes)]
    environment = process_environment() | {_GET_ZCOPY: "y" if case.may_get else "n", "UCX_PROTO_INFO": "y"}
    try:
        found = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace")
        return {"error": "it took too long", "protocols": read_protocols(said)}
    protocols = read_protocols(found.stderr)
    if found.returncode != 0:
        tail = found.stderr.splitlines()[-_NUM_LAST_LINES:]
        return {"error": f"exit status {found.returncode}", "protocols": protocols, "log": tail}
    figures: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return figures | {"protocols": protocols}


def read_protocols(log: str) -> dict[str, list[str]]:
    """Return UCX's tables about reads of a peer's memory: the heading, and for each range of sizes how it is read."""
    tables: dict[str, list[str]] = {}
    heading = None
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.partition("|")[2].strip().strip("|").split("|")]
        if len(cells) == 1 and cells[0]:
            heading = cells[0] if "memory read" in cells[0] else None
        elif heading is not None and ".." in cells[0]:
            rows = tables.setdefault(heading, [])
            row = ": ".join(cells)
            rows += [] if row in rows else [row]
    return tables


def _pool(kind: str, shape: tuple[int, int], *, is_source: bool) -> Tensor:
    """Make blocks of random bytes, the same in each process, or blocks of zeros."""
    if not is_source:
        return torch.zeros(shape, dtype=torch.uint8, device=kind)
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 256, (shape[0], 4096), dtype=torch.uint8, generator=generator)
    return rows.repeat(1, shape[1] // 4096).to(kind)


def be_sender(kind: str, shape: tuple[int, int]) -> None:
    """Print the pool's address and the agent's metadata, then serve until standard input closes."""
    pool = _pool(kind, shape, is_source=True)
    side = BareAgent("sender", pool)
    metadata = base64.b64encode(side.agent.get_agent_metadata()).decode()
    print(json.dumps([metadata, pool.data_ptr(), side.kind]), flush=True)
    side.agent.add_remote_agent(base64.b64decode(sys.stdin.readline()))
    while not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
        side.agent.get_new_notifs()
    os._exit(0)


def be_reader(source: str, target: str, shape: tuple[int, int]) -> None:
    """Read all blocks, scattered on both sides, some times; print the seconds, and check every byte."""
    pool = _pool(target, shape, is_source=False)
    side = BareAgent("reader", pool)
    command = [sys.executable, "-m", "benchmarks.gpu_nixl", "sender", source, source, *map(str, shape)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            metadata, address, kind = json.loads(process.stdout.readline())
            print(base64.b64encode(side.agent.get_agent_metadata()).decode(), file=process.stdin, flush=True)
            peer = side.agent.add_remote_agent(base64.b64decode(metadata))
            side.agent.make_connection(peer)
            rng = np.random.default_rng(3)
            theirs = rng.permutation(shape[0]).astype(np.int32)
            ours = rng.permutation(shape[0]).astype(np.int32)
            blocks = (
                side.blocks("NIXL_INIT_AGENT", pool.data_ptr(), side.kind, shape),
                ours,
                side.blocks(peer, address, kind, shape),
                theirs,
            )
            seconds = [side.read(*blocks) for _ in range(_NUM_ROUNDS)]
            expected = _pool(target, shape, is_source=True)
            is_right = torch.equal(pool[ours], expected[theirs])
            best = min(seconds)
            found = {"is_right": is_right, "seconds": seconds, "bytes_per_second": pool.nbytes / best}
            print(json.dumps(found), flush=True)
        finally:
            process.kill()
    os._exit(0 if is_right else 3)


if __name__ == "__main__":
    role, of_source, of_target, count, size = sys.argv[1:]
    if role == "sender":
        be_sender(of_source, (int(count), int(size)))
    else:
        be_reader(of_source, of_target, (int(count), int(size)))
