"""``python -m benchmarks.startup CHECKPOINT``: start time and memory of an engine.

An engine process is started and generates 16 tokens after a prompt of 64, ``--runs`` times; the files are in the page cache
from the second run on. Memory is that of the engine process, from /proc: "anon" is private, "file" is mapped (programs and
the checkpoint's pages, which the workers of a machine share), "shmem" contains the KV cache. Every run is written as JSON to
standard output, and with ``--write NAME`` to ``results/NAME.json``.
"""

import argparse
import asyncio
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from benchmarks.facts import run_facts, write_result
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.client import ProcessClient
from engine.settings import EngineSettings

_MIB = 2**20
_SAMPLE_SECONDS = 0.005
_PROMPT = [(37 * index + 11) % 1000 for index in range(64)]
_SAMPLING = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@dataclass
class Memory:
    """Peak memory of the engine process in MiB, of each kind separately and of all (VmHWM, exact)."""

    anon: float = 0.0
    file: float = 0.0
    shmem: float = 0.0
    whole: float = 0.0

    def see(self, status: dict[str, float]) -> None:
        """Update the peaks."""
        self.anon = max(self.anon, status["RssAnon"])
        self.file = max(self.file, status["RssFile"])
        self.shmem = max(self.shmem, status["RssShmem"])
        self.whole = max(self.whole, status["VmHWM"])


@dataclass
class Run:
    """One start. seconds: time until it is ready. first_answer_seconds: time of the first request."""

    seconds: float = 0.0
    first_answer_seconds: float = 0.0
    peak_at_start: Memory = field(default_factory=Memory)
    peak: Memory = field(default_factory=Memory)


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--kv-cache-bytes", type=int, default=256 * _MIB)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--write", metavar="NAME")
    arguments = parser.parse_args()
    settings = EngineSettings(
        model=arguments.checkpoint,
        dtype=arguments.dtype,
        num_threads=arguments.num_threads,
        kv_cache_bytes=arguments.kv_cache_bytes,
    )
    runs = [asyncio.run(_run(settings)) for _ in range(arguments.runs)]
    figures = {
        "settings": {"dtype": arguments.dtype, "num_threads": arguments.num_threads},
        "checkpoint_mib": sum(file.stat().st_size for file in arguments.checkpoint.glob("*.safetensors"))
        / _MIB,
        "kv_cache_mib": arguments.kv_cache_bytes / _MIB,
        "load_average": os.getloadavg(),
        "median_seconds": statistics.median(run.seconds for run in runs),
        "runs": [asdict(run) for run in runs],
    }
    print(json.dumps({**run_facts(), "figures": figures}, indent=2))
    if arguments.write:
        write_result(arguments.write, figures)


async def _run(settings: EngineSettings) -> Run:
    run = Run()
    with _watched(run.peak_at_start):
        start = time.monotonic()
        client = await ProcessClient.start(settings)
        run.seconds = time.monotonic() - start
    try:
        with _watched(run.peak):
            start = time.monotonic()
            request = EngineRequest(request_id="first", prompt_token_ids=_PROMPT, sampling=_SAMPLING)
            async for output in client.generate(request):
                assert output.error_message is None, output.error_message
            run.first_answer_seconds = time.monotonic() - start
    finally:
        await client.shutdown()
    return run


@contextmanager
def _watched(memory: Memory) -> Iterator[None]:
    """Sample the engine process continuously, since /proc has no peak of each kind of memory."""
    ended = threading.Event()
    thread = threading.Thread(target=_sample, args=(memory, ended))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _sample(memory: Memory, ended: threading.Event) -> None:
    is_last = False
    while not is_last:
        is_last = ended.wait(_SAMPLE_SECONDS)
        for child in psutil.Process().children(recursive=True):
            if (status := _status(child.pid)) is not None:
                memory.see(status)


def _status(pid: int) -> dict[str, float] | None:
    """Return MiB by name; None if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if line.startswith(("Rss", "VmHWM")))
    if not fields:
        return None
    return {name: int(value.split()[0]) / 1024 for name, value in fields.items()}


if __name__ == "__main__":
    main()
