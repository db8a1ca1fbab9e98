"""A pool of data-parallel groups under ``kvbaton up --autoscale`` changes by whole groups, and no answer differs."""

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from protos import inference_pb2_grpc
from tests.autoscaler.scaled_up import on_paper, running_scaled
from tests.chaos.groups import GroupReport, ask, mixture, questions

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]


async def test_a_group_is_added_and_drained_as_one_worker(tmp_path: Path) -> None:
    """Its two ranks, which are two workers to the router, start together, and end when both are empty."""
    config = tmp_path / "kvbaton.toml"
    config.write_text("[decode]\ndata_parallel_size = 2\n")
    timing = on_paper(prompt=0.05, step=2.0)  # so slow that a few answers a second need both groups
    bounds = ("--prefill", "1:1", "--decode", "1:2", "--config", str(config))
    model = mixture(tmp_path)
    rng = random.Random(17)
    known = await questions(model, rng)
    report = GroupReport()
    async with running_scaled(tmp_path, timing, *bounds, model=model) as scaled:
        await scaled.until_serving(prefill=1, decode=2)
        async with grpc.aio.insecure_channel(scaled.service.grpc) as channel, asyncio.TaskGroup() as tasks:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            has_grown = asyncio.Event()

            async def keep_asking() -> None:
                while not has_grown.is_set():
                    await ask(stub, rng.choice(known), report)

            for _ in range(4):
                tasks.create_task(keep_asking())
            await scaled.until_serving(prefill=1, decode=4)
            has_grown.set()
        await scaled.until_serving(prefill=1, decode=2)
        await scaled.until_line(r"up launch.supervisor: decode-\d ended")
        changes = [found[0] for line in scaled.orders() if (found := re.search(r"decode \d→\d", line))]
        assert changes == ["decode 1→2", "decode 2→1"], scaled.orders()
        assert await scaled.metric("kvbaton_drains_total", result="empty") == 2
    assert report.wrong == []
    assert report.num_whole > 20
