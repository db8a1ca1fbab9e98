"""``kvbaton up --autoscale`` with real workers of the scripted model, on times that the workers only have on paper."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from autoscaler.timing_model import PrefillTiming, StepTiming, TimingModel, write_timing
from tests.scripted_checkpoint import make_scripted_checkpoint
from tests.service import Service, counter, running_service

NO_GOALS = ("--ttft-goal-ms", "600000", "--itl-goal-ms", "600000")
"""Goals so wide that the numbers of workers follow from the rate of requests alone."""
_PACE = ("--scaling-interval-seconds", "0.5", "--shrink-after-seconds", "3")
_PATIENCE_SECONDS = 150.0


def on_paper(*, prompt: float, step: float, start: float = 60.0) -> TimingModel:
    """Return times of a prompt and of a step of up to 32 answers.

    Real workers are far faster, so the law soon halves the times of prompts, and those of steps if they are busy enough.
    """
    return TimingModel(
        prefill=PrefillTiming(base_seconds=prompt, seconds_per_token=0.0),
        decode=(StepTiming(base_seconds=step, seconds_per_context_token=0.0, seconds_per_answer=0.0),),
        kv_tokens=60_000,
        max_answers=32,
        start_seconds=start,
    )


class ScaledService:
    """A running service that scales itself."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.service = service
        self._log = folder / "service.log"

    @property
    def router(self) -> dict[str, Any]:
        """The first router, as the ready file has it now."""
        self.service.read_ready()
        return next(one for one in self.service.processes if one["role"] == "router")

    def lines(self, pattern: str) -> list[str]:
        """Return the logged lines that match."""
        return [line for line in self._log.read_text().splitlines() if re.search(pattern, line)]

    def orders(self) -> list[str]:
        """Return the logged decisions that change a number of workers."""
        return self.lines(r"autoscaler\.controller: prefill \d.*→|autoscaler\.controller: .*decode \d+→")

    async def until_line(self, pattern: str, number: int = 1) -> str:
        """Wait until ``number`` lines match, and return the last one of these."""
        await until(
            lambda: len(self.lines(pattern)) >= number,
            lambda: f"no {pattern!r} in {self._log.read_text()[-4000:]}",
        )
        return self.lines(pattern)[number - 1]

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Return the router's list of workers by id."""
        listed = json.loads(await self.service.get_text(self.router["admin"], "/admin/workers"))["workers"]
        return {worker["id"]: worker for worker in listed}

    async def until_serving(self, **wanted: int) -> None:
        """Wait until so many workers of each role are attached, all of which serve."""
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while True:
                workers = (await self.workers()).values()
                serving = [worker["role"] for worker in workers if worker["state"] == "serving"]
                if len(serving) == len(workers) and all(
                    serving.count(role) == number for role, number in wanted.items()
                ):
                    return
                await asyncio.sleep(0.1)

    async def until_has_computed(self, worker: str) -> None:
        """Wait until a worker has computed a prompt."""
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while True:
                self.service.read_ready()
                admins = [one["admin"] for one in self.service.processes if one["name"] == worker]
                texts = [await self.service.get_text(admin, "/metrics") for admin in admins]
                if texts and counter(texts, "kvbaton_prompt_tokens_total"):
                    return
                await asyncio.sleep(0.1)

    async def metric(self, name: str, **labels: str) -> float:
        """Return a sum of the router's metrics; 0 if there is none with these labels."""
        text = await self.service.get_text(self.router["admin"], "/metrics")
        try:
            return counter([text], name, **labels)
        except AssertionError:
            return 0.0

    async def num_decisions(self) -> float:
        """Return the number of decisions that the router has received."""
        return await self.metric("kvbaton_scaling_decisions_total", pool="prefill")

    async def after_decisions(self, number: int) -> None:
        """Wait for so many more decisions."""
        before = await self.num_decisions()
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while await self.num_decisions() < before + number:
                await asyncio.sleep(0.1)


async def until(is_so: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """Wait until something is so. Raises AssertionError with the text of ``otherwise`` if that takes too long."""
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while not is_so():
                await asyncio.sleep(0.1)
    except TimeoutError as error:
        raise AssertionError(otherwise()) from error


@asynccontextmanager
async def running_scaled(
    folder: Path, timing: TimingModel | None, *flags: str, model: Path | None = None
) -> AsyncIterator[ScaledService]:
    """Run a service with these bounds, which begins with the least workers and decides twice a second.

    timing: of its timing file; None: it has none. model: None: the scripted one.
    """
    file: tuple[str, ...] = ()
    if timing is not None:
        write_timing(folder / "timing.json", timing)
        file = ("--timing", str(folder / "timing.json"))
    model = model or make_scripted_checkpoint(folder / "model")
    given = ("--model", str(model), "--dtype", "float32", "--num-threads", "1", "--drain-seconds", "20")
    scaled = ("--autoscale", *file, *_PACE, *NO_GOALS)
    async with running_service(folder, *given, *scaled, *flags) as service:
        yield ScaledService(service, folder)
    lines = (folder / "service.log").read_text().splitlines()
    assert not any("Traceback" in line for line in lines), "\n".join(lines)
