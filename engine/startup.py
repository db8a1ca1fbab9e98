"""The start of an engine: executor with weights and KV cache, then pool and scheduler."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from contract.errors import SettingError
from engine.connecting import EngineConnector
from engine.info import EngineInfo
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.waits.grammars import Grammars
from engine.scheduling.waits.waits import WaitStage
from engine.settings import EngineSettings

if TYPE_CHECKING:
    from engine.executors.executor import Executor

logger = logging.getLogger(__name__)

ExecutorStart = Callable[[EngineSettings], tuple["Executor", int]]
"""settings → an executor with loaded weights and an allocated KV cache, and the number of blocks."""


def start_executor(settings: EngineSettings) -> tuple["Executor", int]:
    """Load the weights on all ranks, then allocate the KV cache. Raises SettingError for what cannot be served."""
    # Imported here, so that a process that only talks to an engine never loads torch.
    from engine.executors.executor import create_executor
    from engine.kv_cache.startup import initialize_kv_cache

    executor = create_executor(settings)
    num_blocks, _ = initialize_kv_cache(executor)
    return executor, num_blocks


def describe_engine(
    settings: EngineSettings, executor: "Executor", num_blocks: int, control_address: str
) -> EngineInfo:
    """Return the facts about an engine whose executor has started.

    Raises SettingError if ``max_model_len`` was set and does not fit into the KV cache.
    """
    model = executor.model_info
    return EngineInfo(
        vocab_size=model.vocab_size,
        max_model_len=_fitting_length(settings, model.max_model_len, num_blocks),
        eos_token_ids=model.eos_token_ids,
        model_fingerprint=model.fingerprint,
        layout=executor.layout,
        num_ranks=settings.tensor_parallel_size,
        num_blocks=num_blocks,
        dtype=model.dtype,
        has_head=model.has_head,
        num_kv_heads=model.num_kv_heads,
        control_address=control_address,
        device=_first_device(settings),
    )


def _first_device(settings: EngineSettings) -> str:
    """Return the device of the first rank."""
    if settings.device == "cpu":
        return settings.device
    import torch

    from engine.distributed.group import rank_device

    size = settings.tensor_parallel_size
    return str(rank_device(settings.device, torch.cuda.device_count(), 0, size))


def create_scheduler(
    settings: EngineSettings,
    info: EngineInfo,
    connector: EngineConnector,
    grammars: Grammars,
    stages: Sequence[WaitStage],
    clock: Callable[[], float],
) -> Scheduler:
    """Return the scheduler of an engine, with a pool of its blocks."""
    pool = BlockPool(
        info.num_blocks, settings.block_size, enable_prefix_caching=settings.enable_prefix_caching
    )
    return Scheduler(
        settings,
        pool,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        model_fingerprint=info.model_fingerprint,
        connector=connector.scheduler,
        grammars=grammars,
        stages=stages,
        clock=clock,
    )


def _fitting_length(settings: EngineSettings, max_model_len: int, num_blocks: int) -> int:
    """Return the model's length, lowered (with a warning) to what the pool holds; a length that was set must fit."""
    capacity = (num_blocks - 1) * settings.block_size  # block 0 is the null block
    if max_model_len <= capacity:
        return max_model_len
    needed = f"{max_model_len} tokens need more than the {capacity} that the KV cache holds"
    if settings.max_model_len is not None:
        raise SettingError(
            f"max_model_len: {needed}; lower it or raise kv_cache_bytes", param="max_model_len"
        )
    logger.warning("max_model_len is lowered to %d: %s", capacity, needed)
    return capacity
