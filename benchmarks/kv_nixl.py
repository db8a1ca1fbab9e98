"""A bare NIXL script for comparison with the ``nixl`` transport: two agents and one READ of all blocks.

As a program: ``reader NUM_BLOCKS BLOCK_BYTES``, which starts its own ``sender``. A line ``go`` on standard input runs one
READ and is answered with its seconds; ``check`` compares every byte and clears the target.
"""

import base64
import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.bare_nixl import BareAgent
from benchmarks.kv_pools import Job, Shape, Way, job_of

TCP_ONLY = "UCX_TLS=self,tcp"
_POLL_SECONDS = 0.0002
_WAIT_SECONDS = 60.0


@contextmanager
def over_bare_nixl(job: Job, *environment: str) -> Iterator[Way]:
    """Run READs in a separate process, which measures itself, with these variables ("NAME=value")."""
    shape = job.shape
    arguments = ("reader", str(shape.num_blocks), str(shape.block_bytes))
    with _program(*arguments, environment=environment) as process:
        _ask(process, "go")
        _ask(process, "check")

        def fetch() -> float:
            return float(_ask(process, "go"))

        yield fetch
        _ask(process, "check")


def _ask(process: "subprocess.Popen[str]", word: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    return _line(process)


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _WAIT_SECONDS)
    line = process.stdout.readline() if ready else ""
    if not line:
        raise AssertionError("the bare NIXL script has ended, or hangs")
    return line.strip()


@contextmanager
def _program(*arguments: str, environment: tuple[str, ...] = ()) -> Iterator["subprocess.Popen[str]"]:
    """Run this module as a process; it is killed at the end, since NIXL may crash at a normal exit."""
    command = ["env", *environment, sys.executable, "-m", "benchmarks.kv_nixl", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def be_sender(shape: Shape) -> None:
    """Print the pool's address, read the reader's metadata, and drive the library until standard input closes."""
    memory = shape.source_pool()
    agent = BareAgent("sender", memory.pool).agent
    _say(f"{_encoded(agent.get_agent_metadata())} {memory.pool.data_ptr()}")
    agent.add_remote_agent(base64.b64decode(sys.stdin.readline()))
    while True:
        agent.get_new_notifs()
        if select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
            os._exit(0)


def be_reader(shape: Shape) -> None:
    """Run the orders from standard input."""
    job = job_of(shape)
    own = BareAgent("reader", job.target.pool)
    arguments = ("sender", str(shape.num_blocks), str(shape.block_bytes))
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(_program(*arguments))
        metadata, address = _line(process).split()
        assert process.stdin is not None
        process.stdin.write(f"{_encoded(own.agent.get_agent_metadata())}\n")
        process.stdin.flush()
        peer = own.agent.add_remote_agent(base64.b64decode(metadata))
        own.agent.make_connection(peer)
        blocks = (shape.num_blocks, shape.block_bytes)
        theirs = own.blocks(peer, int(address), own.kind, blocks)
        ours = own.blocks("NIXL_INIT_AGENT", job.target.pool.data_ptr(), own.kind, blocks)
        source_ids, target_ids = (np.array(ids, np.int32) for ids in (job.source_ids, job.target_ids))
        for line in sys.stdin:
            if line.strip() == "check":
                job.check("bare NIXL")
                _say("same")
                continue
            _say(str(own.read(ours, target_ids, theirs, source_ids)))
    os._exit(0)


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    role, num_blocks, block_bytes = sys.argv[1:]
    {"reader": be_reader, "sender": be_sender}[role](Shape(int(num_blocks), int(block_bytes)))
