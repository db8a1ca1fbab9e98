"""The settings of a worker and the facts about an engine by which a role calculates its credit."""

from pathlib import Path
from typing import Any

from contract.layout import KVLayout
from engine.info import EngineInfo
from worker.settings import WorkerSettings


def settings_of(**settings: Any) -> WorkerSettings:
    """Return the settings of a worker whose model is not read."""
    return WorkerSettings(model=Path("model"), **settings)


def info_of(num_blocks: int) -> EngineInfo:
    """Return an engine of so many blocks of 4 tokens, of which one is the null block."""
    return EngineInfo(
        vocab_size=100,
        max_model_len=1000,
        eos_token_ids=(),
        model_fingerprint="model",
        layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32"),
        num_blocks=num_blocks,
        dtype="float32",
        control_address="",
    )
