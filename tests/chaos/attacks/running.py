"""Runs one attack on a fresh service beside a bystander, and measures its effects."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.chaos.attacks.bystander import Bystander, bystander_of, p99
from tests.chaos.attacks.target import Target, attacked_service

_REPOSITORY = Path(__file__).resolve().parents[3]
_WEAPON_SECONDS = 150.0
_RECOVERY_SECONDS = 60.0
_MIB = 2**20
_STOP_BYTES = 5 * 2**30
MAX_FACTOR = 1.5
MAX_BYTES = 300 * _MIB
MAX_RECOVERY_SECONDS = 1.0
MAX_P99_FACTOR = 2.0
MAX_LOG_BYTES = 10 * _MIB


@dataclass
class AttackReport:
    """The effects of one attack.

    idle_mib, peak_mib: anonymous memory by process. p99_before, p99_during: seconds of the bystander's answers.
    answered_after: seconds from the attack's end to the end of the first answer that was requested after it.
    """

    name: str
    seconds: float = 0.0
    idle_mib: dict[str, float] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)
    p99_before: float = 0.0
    p99_during: float = 0.0
    num_failed: int = 0
    num_asked: int = 0
    answered_after: float = 0.0
    log_bytes: int = 0

    @property
    def p99_factor(self) -> float:
        """The factor by which the p99 of the bystander grew during the attack."""
        return self.p99_during / max(self.p99_before, 1e-9)

    @property
    def wrong(self) -> list[str]:
        """The bounds that the service exceeded, including those on time, which other work on the machine exceeds too."""
        found = self.too_much
        if self.answered_after > MAX_RECOVERY_SECONDS:
            found.append(f"the first answer came {self.answered_after:.1f} s after the end")
        if self.p99_factor > MAX_P99_FACTOR:
            found.append(f"p99 of others rose from {self.p99_before:.3f} to {self.p99_during:.3f} s")
        return found

    @property
    def too_much(self) -> list[str]:
        """The bounds exceeded that hold on any machine: memory, log, failed answers."""
        found = [
            f"{name} took {peak:.0f} MiB, {self.idle_mib[name]:.0f} when idle"
            for name, peak in self.peak_mib.items()
            if peak > max(self.idle_mib[name] * MAX_FACTOR, MAX_BYTES / _MIB)
        ]
        if self.num_failed:
            found.append(f"{self.num_failed} of {self.num_asked} questions of the bystander failed")
        if self.log_bytes > MAX_LOG_BYTES:
            found.append(f"{self.log_bytes} bytes were logged")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**asdict(self), "p99_factor": self.p99_factor, "wrong": self.wrong}


async def run_attack(folder: Path, name: str, python: str, seconds: float = 15.0) -> AttackReport:
    """Attack a service from the installation of ``python`` with the weapon of this name.

    seconds: the minimum length of the attack, and of the time before it in which the bystander is measured.
    """
    report = AttackReport(name)
    async with attacked_service(folder, python) as target, bystander_of(target) as bystander:
        for _ in range(3):
            await bystander.ask()
        async with _asking(bystander):
            calm = time.monotonic()
            await asyncio.sleep(seconds)
            report.idle_mib = _mib(target.memory())
            logged, began = target.log_bytes(), time.monotonic()
            async with _watching_memory(target, report) as too_large:
                await _strike(replace(target, attack_seconds=seconds), name, too_large)
                ended = time.monotonic()
                report.answered_after = await _first_answer(bystander, ended)
            report.log_bytes = target.log_bytes() - logged
        report.seconds = ended - began
        before, during = bystander.since(calm, began), bystander.since(began, ended)
        report.p99_before, report.p99_during = p99(before), p99(during)
        report.num_asked, report.num_failed = len(during), sum(not reply.is_whole for reply in during)
    return report


async def _strike(target: Target, name: str, too_large: asyncio.Event) -> None:
    """Attack until the weapon ends, its time is over, or the service uses too much memory for this machine."""
    command = (sys.executable, "-m", "tests.chaos.attacks.weapons", name, target.as_json())
    attacker = await asyncio.create_subprocess_exec(
        "nice", "-n", "19", *command, cwd=_REPOSITORY, start_new_session=True
    )
    with suppress(OSError):  # if Linux schedules by session (sched(7)), niceness only counts within one
        Path(f"/proc/{attacker.pid}/autogroup").write_text("19")
    tasks = {asyncio.create_task(attacker.wait()), asyncio.create_task(too_large.wait())}
    _, pending = await asyncio.wait(tasks, timeout=_WEAPON_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    with suppress(ProcessLookupError):
        attacker.kill()
    for task in pending:
        task.cancel()
    await asyncio.wait(tasks)
    await attacker.wait()


async def _first_answer(bystander: Bystander, ended: float) -> float:
    """Return the seconds from ``ended`` until a question that was sent after it has its whole answer."""
    while time.monotonic() - ended < _RECOVERY_SECONDS:
        if (await bystander.ask()).is_whole:
            break
        await asyncio.sleep(0.05)
    return time.monotonic() - ended


@asynccontextmanager
async def _asking(bystander: Bystander) -> AsyncIterator[None]:
    task = asyncio.create_task(bystander.keep_asking())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


@asynccontextmanager
async def _watching_memory(target: Target, report: AttackReport) -> AsyncIterator[asyncio.Event]:
    """Record the peak memory of each process; set the event if the whole service exceeds the limit for an attack."""
    too_large = asyncio.Event()

    async def watch() -> None:
        while True:
            now = await asyncio.to_thread(target.memory)
            for name, mib in _mib(now).items():
                report.peak_mib[name] = max(mib, report.peak_mib.get(name, 0.0))
            if sum(now.values()) > _STOP_BYTES:
                too_large.set()
            await asyncio.sleep(0.2)

    task = asyncio.create_task(watch())
    try:
        yield too_large
    finally:
        task.cancel()
        await asyncio.wait({task})


def _mib(memory: dict[str, int]) -> dict[str, float]:
    return {name: round(num_bytes / _MIB, 1) for name, num_bytes in memory.items()}
