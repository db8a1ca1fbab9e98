"""The sender of a transport in a process of its own, which answers a line with what became of its lease."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kv_transfer.protocol.reads import Source

ROOT = Path(__file__).parents[2]


class Sender:
    """The other end of ``nixl_port`` or ``nccl_port``. source: to read from. first_message: of the process."""

    def __init__(self, process: "subprocess.Popen[str]", boot_id: str, token: str, transport: str) -> None:
        self.process = process
        self.first_message = self._receive()
        self.source = Source("p", boot_id, str(self.first_message["address"]), token, transport)

    def release(self) -> dict[str, object]:
        return self.send("")

    def send(self, line: str) -> dict[str, object]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, object]:
        assert self.process.stdout is not None
        return msgspec.json.decode(self.process.stdout.readline(), type=dict[str, object])


@contextmanager
def running_sender(
    arguments: Sequence[str], token: str, transport: str, environment: Mapping[str, str] | None = None
) -> Iterator[Sender]:
    """``arguments``: the module that it runs, its boot id, and more."""
    with subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    ) as process:
        try:
            yield Sender(process, arguments[1], token, transport)
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()
