"""``kvbaton bench --profile``, against a real router with scripted workers, and once against a real service."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from autoscaler.timing_model import read_timing
from protos import worker_pb2 as pb
from router.testing.script import Script
from tests.cli.test_operate import kvbaton
from tests.router.cluster import PAIR, Cluster, running_cluster

PREFILL_SECONDS = 1e-4
STEP_SECONDS = 0.002


def answer(task: pb.Task) -> Script:
    """Compute each prompt token in a tenth of a millisecond, and each step in two."""
    return Script(
        tokens=[65] * 64,
        token_delay_seconds=STEP_SECONDS,
        timings=pb.LegTimings(prefill_seconds=PREFILL_SECONDS * len(task.prompt_token_ids)),
    )


def arguments(cluster: Cluster, output: Path, *more: str) -> Sequence[str]:
    addresses = cluster.service.addresses
    return (
        *("bench", "--profile", "--url", f"http://{addresses.http}", "--admin", addresses.admin),
        *("--longest-prompt", "64", "--output", str(output), *more),
    )


async def test_a_service_is_measured_and_its_model_can_be_read(tmp_path: Path) -> None:
    async with running_cluster(answer, ()) as cluster:
        for role in PAIR:
            await cluster.add(role, f"{role.value}-0", max_model_len=4096)
        path = tmp_path / "timing.json"
        code, output, errors = await kvbaton(*arguments(cluster, path, "--start-seconds", "7"))
        assert (code, errors) == (0, "")
        assert output.splitlines()[-1] == f"{path} is written"
        assert sum(line.startswith("a prompt of") for line in output.splitlines()) == 3
        model = read_timing(path)
        facts = {worker["id"]: worker for worker in (await pool(cluster))["workers"]}
    assert model.origin == "measured"
    assert model.start_seconds == 7.0
    assert model.kv_tokens == facts["decode-0"]["max_tokens"]
    assert model.max_answers == facts["decode-0"]["max_requests"]
    assert 0.0 <= model.prefill.seconds(64) < 1.0
    assert model.step_seconds(4, 400) > 0.5 * STEP_SECONDS


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
    code, _, errors = await kvbaton("bench", "--profile", "--longest-prompt", "128", "--output", str(path))
    assert (code, errors) == (0, "")
    model = read_timing(path)
    assert model.prefill.seconds(128) > 0.0
    assert model.step_seconds(8, 8 * 128.0) > 0.0
