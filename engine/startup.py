"""The start of an engine: executor with weights and KV cache, then pool and scheduler."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from contract.cache_layout import CacheLayout
from contract.errors import SettingError
from contract.state_layout import StateLayout
from engine.connecting import EngineConnector
from engine.info import EngineInfo
from engine.scheduling.blocks.cache_pools import CachePools, pool_of
from engine.scheduling.blocks.state_slots import StateSlots
from engine.scheduling.blocks.state_snapshots import StateSnapshots
from engine.scheduling.interface import SchedulerInterface
from engine.scheduling.live_requests import Limits
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.waits.grammars import Grammars
from engine.scheduling.waits.waits import WaitStage
from engine.settings import EngineSettings

if TYPE_CHECKING:
    from engine.executor import Executor

logger = logging.getLogger(__name__)

ExecutorStart = Callable[[EngineSettings], tuple["Executor", int]]
"""settings → an executor with loaded weights and an allocated KV cache, and the number of blocks."""


@contextmanager
def log_start(clock: Callable[[], float]) -> Iterator[None]:
    """Log the time that the start of an engine, which is this block, has taken; nothing if it fails. clock: seconds."""
    started_at = clock()
    yield
    logger.info(
        "the engine has started in %.3f s: weights, KV cache, warm-up and connector", clock() - started_at
    )


def start_executor(settings: EngineSettings) -> tuple["Executor", int]:
    """Load the weights on all ranks, then allocate the KV cache. Raises SettingError for what cannot be served."""
    # Imported here, so that a process that only talks to an engine never loads torch.
    from engine.executor import create_executor
    from engine.kv_cache.shares import StateNeeds, Workload
    from engine.kv_cache.startup import initialize_kv_cache

    executor = create_executor(settings)
    layout = executor.model_info.states
    num_snapshots = _num_snapshots(settings)
    has_drafts = settings.speculate != "none"
    states = None if layout is None else StateNeeds(layout, settings.block_size, num_snapshots, has_drafts)
    workload = None
    why_whole = ""
    if settings.keeps_all_tokens:
        why_whole = "keeps_all_tokens is set"
    else:
        length = executor.model_info.max_model_len
        workload = Workload(length, settings.max_num_batched_tokens, settings.max_num_seqs)
    num_blocks, _ = initialize_kv_cache(executor, workload=workload, why_whole=why_whole, states=states)
    return executor, num_blocks


def _num_snapshots(settings: EngineSettings) -> int:
    return settings.state_snapshots if settings.enable_prefix_caching else 0


def describe_engine(
    settings: EngineSettings, executor: "Executor", num_blocks: int, control_address: str
) -> EngineInfo:
    """Return the facts about an engine whose executor has started.

    Raises SettingError if ``max_model_len`` was set and does not fit into the KV cache.
    """
    model = executor.model_info
    device = settings.device
    if device != "cpu":
        import torch  # not above: a process that only talks to an engine never loads it

        from engine.distributed.group import rank_device

        size = settings.tensor_parallel_size
        device = str(rank_device(device, torch.cuda.device_count(), 0, size))
    max_model_len = model.max_model_len
    config = executor.kv_cache_config
    capacity = (num_blocks - 1) * settings.block_size  # block 0 is the null block
    if config is not None and config.cache.groups[0].window is not None:
        capacity = max_model_len  # what windows have passed is not kept
    if max_model_len > capacity:
        needed = f"{max_model_len} tokens need more than the {capacity} that the KV cache holds"
        # The model's own length is lowered, but one that was set must fit.
        if settings.max_model_len is not None:
            raise SettingError(
                f"max_model_len: {needed}; lower it or raise kv_cache_bytes", param="max_model_len"
            )
        logger.warning("max_model_len is lowered to %d: %s", capacity, needed)
        max_model_len = capacity
    return EngineInfo(
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=model.eos_token_ids,
        model_fingerprint=model.fingerprint,
        layout=executor.layout,
        num_ranks=settings.tensor_parallel_size,
        num_blocks=num_blocks,
        dtype=model.dtype,
        has_head=model.has_head,
        num_kv_heads=model.num_kv_heads,
        control_address=control_address,
        device=device,
        model=str(settings.model),
        groups=() if config is None or config.cache.is_uniform else config.cache.groups,
        group_blocks=() if config is None or config.cache.is_uniform else config.num_blocks,
        states=None if config is None else config.cache.states,
        num_state_slots=0 if config is None else config.num_state_slots,
        num_spare_slots=0 if config is None else config.num_spare_slots,
        num_snapshot_slots=_num_snapshots(settings)
        if config is not None and config.cache.states is not None
        else 0,
    )


SchedulerFactory = Callable[
    [EngineSettings, EngineInfo, EngineConnector, Grammars, Sequence[WaitStage], Callable[[], float]],
    SchedulerInterface,
]
"""settings, facts, connector, grammars, further wait stages and clock of an engine → its scheduler."""


def _slots(info: EngineInfo, layout: StateLayout) -> StateSlots:
    """Return the slots of an engine, of which the last ones are for drafts, and those before these for snapshots."""
    num_requests = info.num_request_slots
    num_snapshots = info.num_snapshot_slots
    snapshots = (
        StateSnapshots(num_requests + 1, num_snapshots, info.layout.block_size) if num_snapshots else None
    )
    return StateSlots(num_requests, snapshots, info.num_spare_slots, layout.num_pieces)


def create_scheduler(
    settings: EngineSettings,
    info: EngineInfo,
    connector: EngineConnector,
    grammars: Grammars,
    stages: Sequence[WaitStage],
    clock: Callable[[], float],
) -> SchedulerInterface:
    """Return the scheduler of an engine, with pools of its blocks."""
    groups = info.groups or CacheLayout.of(info.layout, [None] * info.layout.num_layers).groups
    states = info.states
    pools = CachePools(
        groups,
        [
            pool_of(group, number, enable_prefix_caching=settings.enable_prefix_caching)
            for group, number in zip(groups, info.group_blocks or (info.num_blocks,), strict=True)
        ],
        settings.max_num_batched_tokens,
        None if states is None else _slots(info, states),
    )
    limits = Limits.of(
        pools, info.max_model_len, info.vocab_size, info.model_fingerprint, settings.max_prompt_tokens
    )
    if limits.max_prompt_tokens is not None and limits.max_prompt_tokens < limits.max_length:
        logger.warning(
            "prompts longer than %d tokens are rejected: prefill-first computes each of them in one step, of"
            " max_num_batched_tokens; the model has room for %d",
            limits.max_prompt_tokens,
            limits.max_length,
        )
    return Scheduler(
        settings,
        pools,
        limits,
        remote_kv=connector.remote_kv(pools, limits.max_length, settings.remote_kv_timeout_seconds),
        grammars=grammars,
        stages=stages,
        clock=clock,
    )
