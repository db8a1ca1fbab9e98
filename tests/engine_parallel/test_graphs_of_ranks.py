"""Ranks that capture their collectives in graphs: equal answers, and what NCCL needs for it."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import Store

from contract.sampling import SamplingParams
from engine.distributed.process_group import TorchRankGroup
from engine.models.loading import LoadedModel
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine_compute.driver import Driver
from tests.engine_compute.test_equals_transformers import PROMPTS
from tests.engine_parallel.driver import SEEDED, RanksDriver, driven
from tests.fakes.engine.collectives import CountedGroup
from tests.fakes.engine.graphs import FakeDeviceGraphs
from tests.fakes.engine.local_ranks import groups_of_threads

dist: Any = distributed

NUM_TOKENS = 9


@pytest.mark.parametrize("sampled", [[None], [SEEDED], [None, SEEDED]])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_graphs_give_the_answers_of_one(
    tmp_path: Path, size: int, sampled: list[SamplingParams | None]
) -> None:
    """Graphs find the best tokens of all ranks; whole logits are gathered, and tokens shared, behind steps that draw."""
    folder = make_checkpoint(tmp_path, "qwen2", seed=3)

    def answers(driver: Driver) -> dict[str, list[int]]:
        for number, sampling in enumerate(sampled):
            for name, prompt in PROMPTS.items():
                driver.add(f"{name} {number}", prompt, sampling)
        return driver.generate(list(driver.sequences), NUM_TOKENS, 1000)

    with driven(Driver(folder)) as one:
        expected = answers(one)
    groups = [CountedGroup(group) for group in groups_of_threads(size)]
    made: list[FakeDeviceGraphs] = []

    def make_forward(loaded: LoadedModel, settings: EngineSettings, device: torch.device) -> FakeDeviceGraphs:
        made.append(FakeDeviceGraphs(loaded, settings, device))
        return made[-1]

    with driven(RanksDriver(folder, groups, make_forward, tensor_parallel_size=size)) as several:
        for group in groups:
            group.clear()
        assert answers(several) == expected
    for graphs in made:
        assert sum(recording.num_replays for recording in graphs.recorder.recordings) == NUM_TOKENS - 1
    num_draws = 0 if sampled == [None] else NUM_TOKENS
    num_found = NUM_TOKENS if sampled == [None] else NUM_TOKENS - 1
    for group in groups:
        assert group.num_calls["gather"] == group.num_calls["share"] == num_draws
        assert group.num_calls["highest"] == num_found


class PlayedWork:
    def wait(self) -> None:
        raise AssertionError("on the current stream there is nothing to wait for")


class PlayedNccl:
    """NCCL's group as of torch 2.8: a collective on the current stream has no work object (None is returned).

    log: the collectives, and whether they were to run on a stream of its own.
    """

    def __init__(self) -> None:
        self.log = list[tuple[str, bool]]()

    def create(self, device: torch.device, rank: int, size: int, store: Store) -> "PlayedNccl":
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.log.append(("timeout", False))

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> PlayedWork | None:
        return self._noted("allreduce", options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> PlayedWork | None:
        return self._noted("broadcast", options)

    def gather(self, outputs: object, tensors: list[torch.Tensor], options: Any) -> PlayedWork | None:
        return self._noted("gather", options)

    def shutdown(self) -> None:
        self.log.append(("shutdown", False))

    def _noted(self, name: str, options: Any) -> PlayedWork | None:
        self.log.append((name, options.asyncOp))
        return PlayedWork() if options.asyncOp else None


def test_nccl_runs_on_the_current_stream_with_a_communicator_that_is_there() -> None:
    """Its own stream could not be captured; its communicator is formed with the first collective, which must not be."""
    played = PlayedNccl()
    group = TorchRankGroup(
        torch.device("meta"), 0, 2, dist.HashStore(), timedelta(seconds=5), create=played.create
    )
    assert played.log == [("allreduce", False), ("timeout", False)]
    part = torch.zeros(2, 3, device="meta")
    assert group.add_up(part) is part and group.share(part) is part
    keys = torch.zeros(2, dtype=torch.int64, device="meta")
    assert group.highest(keys) is keys
    assert group.gather_columns(part, 6).shape == (2, 6)
    group.close()
    assert played.log[2:] == [
        (name, False) for name in ("allreduce", "broadcast", "allreduce", "gather", "shutdown")
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_without_a_work_object_are_not_waited_for(rank: int) -> None:
    """On every rank, with and without rows: rank 1 gathers nothing, and an empty batch gathers nothing anywhere."""
    played = PlayedNccl()
    group = TorchRankGroup(
        torch.device("meta"), rank, 2, dist.HashStore(), timedelta(seconds=5), create=played.create
    )
    for num_rows in (0, 1, 5):
        part = torch.zeros(num_rows, 3, device="meta")
        gathered = group.gather_columns(part, 5)
        assert gathered.shape == (num_rows, 5 if rank == 0 and num_rows else 3)
        assert group.share(part) is part
        assert group.add_up(part.T).shape == (3, num_rows)
