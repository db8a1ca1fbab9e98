"""``kvbaton bench --profile``, against a real router with scripted workers, and once against a real service."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autoscaler.timing_model import read_timing
from contract.identity import Role
from protos import worker_pb2 as pb
from tests.cli.test_operate import kvbaton
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.text.tiny_model import END

PREFILL_SECONDS = 1e-4
STEP_SECONDS = 0.002


def answer(task: pb.Task, slower: float = 1.0) -> Script:
    """Compute each prompt token in a tenth of a millisecond, or ``slower`` times that, and each step in two.

    A prefill takes its time: the router cuts what a worker reports to what it has measured itself.
    """
    seconds = slower * PREFILL_SECONDS * len(task.prompt_token_ids)
    return Script(
        tokens=[65] * 64,
        token_delay_seconds=seconds if task.first_index == 0 else STEP_SECONDS,
        timings=pb.LegTimings(prefill_seconds=seconds),
    )


def arguments(cluster: Cluster, output: Path, *more: str) -> Sequence[str]:
    addresses = cluster.service.addresses
    return (
        *("bench", "--profile", "--url", f"http://{addresses.http}", "--admin", addresses.admin),
        *("--longest-prompt", "64", "--output", str(output), *more),
    )


@pytest.mark.slow
async def test_a_service_is_measured_and_its_model_can_be_read(tmp_path: Path) -> None:
    """Three lengths, five prompts each, in three rounds. The second round is disturbed, and does not count."""
    prompts: list[pb.Task] = []

    def disturbed(task: pb.Task) -> Script:
        if task.sampling.max_tokens == 2 and task.first_index == 0:
            prompts.append(task)
        is_slow = 1 + 15 < len(prompts) <= 1 + 2 * 15
        return answer(task, 10.0 if is_slow else 1.0)

    async with running_cluster(disturbed, ()) as cluster:
        for role in PAIR:
            await cluster.add(role, f"{role.value}-0", max_model_len=4096)
        path = tmp_path / "timing.json"
        code, output, errors = await kvbaton(*arguments(cluster, path, "--start-seconds", "7"))
        assert (code, errors) == (0, "")
        assert output.splitlines()[-1] == f"{path} is written"
        assert sum(line.startswith("a prompt of") for line in output.splitlines()) == 3 * 3
        model = read_timing(path)
        facts = {worker["id"]: worker for worker in (await pool(cluster))["workers"]}
    assert model.origin == "measured"
    assert model.start_seconds == 7.0
    assert model.kv_tokens == facts["decode-0"]["max_tokens"]
    assert model.max_answers == facts["decode-0"]["max_requests"]
    assert model.prefill.seconds(64) == pytest.approx(64 * PREFILL_SECONDS, rel=0.3)
    assert model.step_seconds(4, 400) > 0.5 * STEP_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize(("roles", "num_beside"), [((*PAIR, Role.DECODE), 2), ((Role.AGGREGATED,), 0)])
async def test_prompts_are_measured_while_each_decode_worker_continues_an_answer(
    roles: Sequence[Role], num_beside: int, tmp_path: Path
) -> None:
    """Workers may share cores, where a prompt alone is faster. Aggregated ones would compute both in one step."""
    wanted: list[int] = []

    def recorded(task: pb.Task) -> Script:
        if task.first_index == 0:
            wanted.append(task.sampling.max_tokens)
        return answer(task)

    async with running_cluster(recorded, ()) as cluster:
        for number, role in enumerate(roles):
            await cluster.add(role, f"{role.value}-{number}", max_model_len=4096)
        code, _, errors = await kvbaton(*arguments(cluster, tmp_path / "timing.json", "--rounds", "1"))
    assert (code, errors) == (0, "")
    last = len(wanted) - wanted[::-1].index(2)
    beside = [number for number in wanted[1:last] if number > 2]
    assert len(beside) >= num_beside and bool(beside) is bool(num_beside)


@pytest.mark.parametrize("beside", [False, True])
async def test_an_error_of_the_service_is_one_line(beside: bool, tmp_path: Path) -> None:
    """It ends a measured prompt, or an answer that a worker continues beside it."""

    def failing(task: pb.Task) -> Script:
        num_tokens = task.sampling.max_tokens
        fails = num_tokens == 64 if beside else num_tokens == 2 and len(task.prompt_token_ids) > 25
        return replace(answer(task), fail_at=1 if fails else None)

    async with running_cluster(failing, ()) as cluster:
        for role in PAIR:
            await cluster.add(role, f"{role.value}-0", max_model_len=4096)
        code, _, errors = await kvbaton(*arguments(cluster, tmp_path / "timing.json"))
    assert code != 0
    assert "an error of the script" in errors and len(errors.splitlines()) == 1
    assert not (tmp_path / "timing.json").exists()


@pytest.mark.parametrize("is_before", [True, False])
async def test_a_service_that_others_use_is_not_measured(is_before: bool, tmp_path: Path) -> None:
    """A request of another client runs before the measurement, or comes with its first prompt."""
    other: list[asyncio.Task[object]] = []

    def played(task: pb.Task) -> Script:
        if task.sampling.max_tokens == 7:
            return Script(tokens=[65] * 4, stall_at=1) if is_before else Script(tokens=[END])
        if not is_before and not other:
            other.append(
                asyncio.create_task(cluster.post("/v1/completions", {"prompt": "other", "max_tokens": 7}))
            )
        return answer(task)

    async with running_cluster(played, ()) as cluster:
        for role in PAIR:
            await cluster.add(role, f"{role.value}-0", max_model_len=4096)
        if is_before:
            other.append(
                asyncio.create_task(cluster.post("/v1/completions", {"prompt": "other", "max_tokens": 7}))
            )
            await cluster.until(lambda state: any(worker["num_legs"] for worker in state["workers"]))
        code, _, errors = await kvbaton(*arguments(cluster, tmp_path / "timing.json", "--rounds", "1"))
        if is_before:
            other[0].cancel()
        await asyncio.wait(other)
    assert code != 0
    assert "requests of others" in errors and len(errors.splitlines()) == 1
    assert not (tmp_path / "timing.json").exists()


async def pool(cluster: Cluster) -> dict[str, list[dict[str, object]]]:
    code, output, _ = await kvbaton("workers", "--admin", cluster.service.addresses.admin, "--json")
    assert code == 0
    listed: dict[str, list[dict[str, object]]] = json.loads(output)
    return listed


async def test_a_service_without_decode_workers_is_not_measured(tmp_path: Path) -> None:
    async with running_cluster(answer, ()) as cluster:
        code, _, errors = await kvbaton(*arguments(cluster, tmp_path / "timing.json"))
    assert code == 2
    assert "no decode worker is attached" in errors


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((), "give --profile"),
        (("--profile", "--url", "127.0.0.1:1"), "url and admin belong together"),
        (("--profile", "--admin", "127.0.0.1:1"), "url and admin belong together"),
        (("--profile", "--longest-prompt", "8"), "longest_prompt"),
    ],
)
async def test_contradictory_flags_are_refused(given: Sequence[str], named: str) -> None:
    code, _, errors = await kvbaton("bench", *given)
    assert code == 2
    assert named in errors


@pytest.mark.slow
@pytest.mark.e2e
async def test_the_demo_model_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "timing.json"
    flags = ("--longest-prompt", "128", "--rounds", "1", "--output", str(path))
    code, _, errors = await kvbaton("bench", "--profile", *flags)
    assert (code, errors) == (0, "")
    model = read_timing(path)
    assert model.prefill.seconds(128) > 0.0
    assert model.step_seconds(8, 8 * 128.0) > 0.0
