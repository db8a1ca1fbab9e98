"""Drives ranks in threads with hand-made SchedulerOutputs."""

from pathlib import Path
from typing import Any

from engine.distributed.local import LocalRanksExecutor
from engine.kv_cache.startup import initialize_kv_cache
from engine.settings import EngineSettings
from tests.engine_compute.driver import Driver, Sequence


class RanksDriver(Driver):
    """Two ranks and a block allocator; ``runner`` is rank 0's."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "block_size": 4,
            "kv_cache_bytes": 1 << 21,
            "max_num_seqs": 16,
            "tensor_parallel_size": 2,
        }
        self.settings = EngineSettings(model=folder, **{**defaults, **settings})
        self.ranks = LocalRanksExecutor(self.settings)
        self.executor = self.ranks  # type: ignore[assignment]
        self.num_blocks, _ = initialize_kv_cache(self.ranks)
        self.runner = self.ranks.runners[0]
        self.sequences: dict[str, Sequence] = {}
        self._next_block = 1
