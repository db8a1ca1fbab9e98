"""The start-up of the KV cache in five steps, each logged with its time.

1. ask every rank for the specs of its layers;
2. make every rank measure its free memory (a profiled forward pass without KV);
3. compute each rank's number of blocks;
4. unify to the smallest, so that a block id means the same on all ranks;
5. allocate, then warm up.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from engine.kv_cache.specs import make_config, unify

_logger = logging.getLogger(__name__)
_ResultT = TypeVar("_ResultT")


class RankGroup(Protocol):
    """All ranks of an engine."""

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call the method on every rank; results in rank order."""


def initialize_kv_cache(ranks: RankGroup) -> tuple[int, int]:
    """Start the KV cache of all ranks; return (device blocks, host blocks), the latter always 0.

    Raises SettingError if fewer than two blocks fit.
    """
    specs = _timed("1/5 specs", lambda: ranks.collective_rpc("get_kv_cache_specs"))
    available = _timed("2/5 available memory", lambda: ranks.collective_rpc("determine_available_memory"))
    configs = _timed(
        "3/5 config per worker",
        lambda: [make_config(of_rank, free) for of_rank, free in zip(specs, available, strict=True)],
    )
    unified = _timed("4/5 unify", lambda: unify(configs))
    _timed("5/5 allocate", lambda: ranks.collective_rpc("initialize_from_config", unified[0]))
    _timed("warm-up", lambda: ranks.collective_rpc("warm_up"))
    config = unified[0]
    _logger.info(
        "KV cache: %d blocks of %d tokens, %d bytes", config.num_blocks, config.layout.block_size,
        config.num_blocks * config.layout.block_bytes,
    )  # fmt: skip
    return config.num_blocks, 0


def _timed(name: str, step: Callable[[], _ResultT]) -> _ResultT:
    start = time.monotonic()
    result = step()
    _logger.info("KV cache %s: %.3f s", name, time.monotonic() - start)
    return result
