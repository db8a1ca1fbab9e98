"""Data-parallel groups under P/D: random arrivals at all ranks, with or without the end of a process in between."""

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.client import InProcessClient
from engine.settings import EngineSettings
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.checkpoints import make_foreign_checkpoint
from tests.service import Service, counter, generate, running_service

NUM_QUESTIONS = 40
_SETTLE_SECONDS = 30.0


@dataclass
class GroupReport:
    """The results of a run. wrong: answers that differ from those of one engine, and counters that do not agree."""

    num_whole: int = 0
    num_tokens: int = 0
    num_kills: int = 0
    num_steps: float = 0
    num_dummy_steps: float = 0
    num_calls: float = 0
    wrong: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Question:
    """A prompt of bytes, and the greedy answer of one engine with all experts."""

    prompt: list[int]
    answer: list[int]


def mixture(folder: Path) -> Path:
    """Write a tiny checkpoint with experts."""
    model = folder / "experts"
    model.mkdir()
    return make_foreign_checkpoint(model, "qwen3_moe", seed=3)


async def questions(model: Path, rng: random.Random) -> list[Question]:
    """Draw prompts, and have them answered by one engine."""
    client = await InProcessClient.start(
        EngineSettings(model=model, dtype="float32", kv_cache_bytes=2**24, block_size=16)
    )
    found = []
    try:
        for number in range(NUM_QUESTIONS):
            prompt = [rng.randrange(256) for _ in range(rng.choice((1, 5, 17, 40, 90)))]
            sampling = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 24), ignore_eos=True)
            request = EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)
            tokens = [token async for output in client.generate(request) for token in output.token_ids]
            found.append(Question(prompt, tokens))
    finally:
        await client.shutdown()
    return found


@asynccontextmanager
async def running_groups(folder: Path, model: Path, *flags: str) -> AsyncIterator[Service]:
    """Run a service of float32 workers on this model."""
    pools = (
        "--model",
        str(model),
        "--dtype",
        "float32",
        "--num-threads",
        "1",
        "--served-model-name",
        "experts",
    )
    async with running_service(folder, *pools, *flags) as service:
        yield service


async def run_groups(
    folder: Path, rng: random.Random, *flags: str, num_requests: int, at_once: int = 16, num_kills: int = 0
) -> GroupReport:
    """Ask ``num_requests`` questions of a service started with ``flags``; end processes of random ranks meanwhile."""
    report = GroupReport()
    model = mixture(folder)
    known = await questions(model, rng)
    async with (
        running_groups(folder, model, *flags) as service,
        grpc.aio.insecure_channel(service.grpc) as channel,
    ):
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        numbers = iter(range(num_requests))

        async def keep_asking() -> None:
            for _ in numbers:
                await asyncio.sleep(rng.choice((0.0, 0.0, 0.0, 0.02)))
                await ask(stub, rng.choice(known), report)

        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(keep_asking()) for _ in range(at_once)]
            for _ in range(num_kills):
                await asyncio.sleep(rng.uniform(1.0, 4.0))
                report.num_kills += end_a_rank(service, rng)
                await asyncio.sleep(12.0)
            await asyncio.wait(asking)
        if not num_kills:
            await note_counters(service, report)
    return report


async def ask(stub: Any, question: Question, report: GroupReport) -> None:
    """Ask one question, and compare the answer."""
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=len(question.answer), ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=question.prompt), sampling=sampling)
    try:
        got = (await generate(stub, request)).token_ids
    except grpc.aio.AioRpcError as error:
        report.wrong.append(f"{error.code()}: {error.details()}")
        return
    if got != question.answer:
        report.wrong.append(f"{question.prompt}: {got} instead of {question.answer}")
    report.num_whole += 1
    report.num_tokens += len(got)


def ranks_of(service: Service) -> list[int]:
    """Return the process ids of the workers, which are the children of the groups' launchers."""
    launchers = [process["pid"] for process in service.processes if process["role"] != "router"]
    found = []
    for launcher in launchers:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        found += [
            int(child)
            for child in children
            if b"data-parallel-rank" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
    return found


def end_a_rank(service: Service, rng: random.Random) -> int:
    """Kill, or stop and continue too late, the process of one rank; return 1, or 0 if none runs just now."""
    ranks = ranks_of(service)
    if not ranks:
        return 0
    os.kill(rng.choice(ranks), signal.SIGKILL)
    return 1


async def note_counters(service: Service, report: GroupReport) -> None:
    """Wait until no rank steps any more; then the ranks of each group must have made equally many passes."""
    router = next(process for process in service.processes if process["role"] == "router")
    listed = json.loads(await service.get_text(router["admin"], "/admin/workers"))["workers"]
    addresses = {worker["id"]: worker["admin_address"] for worker in listed}
    async with asyncio.timeout(_SETTLE_SECONDS):
        before = Counter[str]()
        while True:
            texts = {name: await service.get_text(address, "/metrics") for name, address in addresses.items()}
            ranks = [name for name, text in texts.items() if "kvbaton_group_steps_total" in text]
            steps = Counter(
                {name: int(counter([texts[name]], "kvbaton_group_steps_total")) for name in ranks}
            )
            if steps == before:
                break
            before = steps
            await asyncio.sleep(0.5)
    of_groups: dict[str, set[int]] = {}
    for name, number in steps.items():
        of_groups.setdefault(name.rpartition("-")[0], set()).add(number)
    report.wrong += [
        f"{group}: {sorted(numbers)} steps" for group, numbers in of_groups.items() if len(numbers) > 1
    ]
    report.num_steps = sum(steps.values())
    report.num_dummy_steps = counter(list(texts.values()), "kvbaton_dummy_steps_total")
    report.num_calls = counter(list(texts.values()), "kvbaton_group_calls_total")
