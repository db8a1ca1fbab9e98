"""Runs engines in separate processes that take turns: while one is measured, all others are stopped (SIGSTOP)."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.others import peak_bytes, tree
from benchmarks.peers.work import Load, Prompts
from benchmarks.settings import environment_of

_ROOT = Path(__file__).parents[1]
_END_SECONDS = 10.0


class RunnerError(Exception):
    """An engine did not start, ended early or took too long; the message names its log."""


@dataclass(frozen=True)
class Program:
    """A module that ``benchmarks.peers.work`` runs, and its Python. name: its name in the figures."""

    name: str
    module: str
    python: str = sys.executable


@dataclass(frozen=True)
class Order:
    """Batches of prompts to run in sequence; every answer has ``num_tokens`` tokens."""

    batches: list[Prompts]
    num_tokens: int
    wants_tokens: bool = False


class Runner:
    """One engine, loaded when the constructor returns, stopped between turns. Close it.

    time_limit: seconds for its start and for each order, after which it is killed. cores: those on which it may run.
    """

    def __init__(
        self, program: Program, load: Load, log: Path, cores: tuple[int, ...], time_limit: float
    ) -> None:
        self.name = program.name
        self._log = log
        self.time_limit = time_limit
        begin = time.perf_counter()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                ["taskset", "-c", ",".join(map(str, cores)), program.python, "-m", program.module],
                cwd=_ROOT,
                env=environment_of(program.module, cores),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        try:
            self.facts: dict[str, Any] = self._ask(asdict(load))
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - begin
        self._stop()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Resume the engine within the block."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._stop()

    def run(self, order: Order) -> dict[str, Any]:
        """Run an order, within a turn, and return ``seconds`` and ``token_ids``. Raises RunnerError."""
        return self._ask(asdict(order))

    @property
    def peak_bytes(self) -> int:
        """The peak memory of the engine's processes."""
        return peak_bytes(self._process.pid)

    def close(self) -> None:
        """Stop the engine and its children."""
        started = _children(self._process.pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._signal(signal.SIGCONT)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        for child in started:
            with suppress(psutil.NoSuchProcess):
                child.kill()

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        guard = threading.Timer(self.time_limit, self._process.kill)
        guard.start()
        try:
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            guard.cancel()
        if not line:
            raise RunnerError(f"{self.name} ended or took over {self.time_limit:g} s; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _stop(self) -> None:
        """Block until the engine has stopped or ended: a signal is delivered asynchronously."""
        self._signal(signal.SIGSTOP)
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in tree(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def random_prompts(rng: random.Random, num_prompts: int, num_tokens: int, vocab_size: int) -> Prompts:
    """Make prompts that are in no cache, without the first ids of the vocabulary, which are special tokens."""
    first = min(16, vocab_size // 2)
    return [[rng.randrange(first, vocab_size) for _ in range(num_tokens)] for _ in range(num_prompts)]
