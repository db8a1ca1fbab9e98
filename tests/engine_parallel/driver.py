"""Drives ranks in threads with hand-made SchedulerOutputs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contract.sampling import SamplingParams
from engine.compute.forward import MakeForward
from engine.distributed.group import RankGroup
from engine.kv_cache.startup import initialize_kv_cache
from engine.settings import EngineSettings
from tests.engine_compute import driver
from tests.engine_compute.driver import Driver
from tests.fakes.engine.local_ranks import LocalRanksExecutor

SEEDED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=5, max_tokens=1000)


@contextmanager
def driven(driver: Driver) -> Iterator[Driver]:
    """Shut the driver's executor down after the block."""
    try:
        yield driver
    finally:
        driver.executor.shutdown()


class RanksDriver(Driver):
    """Two ranks and a block allocator; ``runner`` is rank 0's. groups, make_forward: see LocalRanksExecutor."""

    def __init__(
        self,
        folder: Path,
        groups: Sequence[RankGroup] | None = None,
        make_forward: MakeForward | None = None,
        **settings: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "block_size": 4,
            "kv_cache_bytes": 1 << 21,
            "max_num_seqs": 16,
            "tensor_parallel_size": 2,
        }
        self.settings = EngineSettings(model=folder, **{**defaults, **settings})
        self.ranks = LocalRanksExecutor(self.settings, groups, make_forward)
        self.executor = self.ranks  # type: ignore[assignment]
        self.num_blocks, _ = initialize_kv_cache(self.ranks)
        self.runner = self.ranks.runners[0]
        self.sequences: dict[str, driver.Sequence] = {}
        self._next_block = 1
