"""Load a model that is ready to run, and its properties, from a checkpoint folder."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from contract.layout import model_fingerprint
from engine.distributed.group import RankGroup, SingleRank
from engine.fp8.choice import prepare, why_converted
from engine.fp8.stored import Fp8Checkpoint
from engine.models.checkpoint import Checkpoint, Weights, read_config, read_eos_token_ids, resolve_dtype
from engine.models.config import Head, ModelShape, RawConfig, check_counts
from engine.models.info import ModelInfo
from engine.models.language_model import LanguageModel
from engine.models.registry import architecture_name, find_architecture
from engine.models.served import model_length, plan_own, refuse_ranks
from engine.models.sharding import config_of_rank, part_of
from engine.models.weights import DTYPES, load_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """One rank's part of a model, with its weights on the device.

    config: that part; info: the whole model; group: the ranks that have all parts.
    """

    model: LanguageModel
    config: ModelShape
    info: ModelInfo
    group: RankGroup = SingleRank()  # noqa: RUF009 - it has no state


def load(
    folder: Path,
    dtype: str,
    max_model_len: int | None,
    device: torch.device,
    group: RankGroup | None = None,
    fp8_products: str = "auto",
) -> LoadedModel:
    """Read the folder and put the model, or the part of a rank of ``group``, on ``device``.

    fp8_products: see ``engine.options.ModelOptions``.

    Raises SettingError for a folder that cannot be served, and for a ``max_model_len`` beyond the model's positions.
    """
    group = group or SingleRank()
    raw = read_config(folder)
    checkpoint = Checkpoint(folder)
    check_counts(raw, len(checkpoint.names()))
    architecture = find_architecture(raw)
    if architecture is None:
        return _load_from_transformers(folder, raw, checkpoint, dtype, max_model_len, device, group)
    plan = plan_own(folder, raw, architecture, checkpoint, dtype, max_model_len)
    of_rank = config_of_rank(plan.config, group.size)
    group.check_dtype(DTYPES[plan.dtype])
    with torch.device("meta"):
        model = architecture.build(of_rank, plan.head, group).to(DTYPES[plan.dtype])
    numbers = _numbers(model, plan.weights, plan.dtype, device, group, fp8_products)
    load_weights(model, plan.weights, device, lambda tensor: part_of(tensor, plan.config, group))
    model.place(device)
    has_head = plan.head is not Head.NONE
    info = _info(folder, raw, plan.config, plan.length, plan.dtype, has_head, numbers)
    return LoadedModel(model.eval(), of_rank, info, group)


def _numbers(
    model: LanguageModel, weights: Weights, dtype: str, device: torch.device, group: RankGroup, setting: str
) -> str:
    """Prepare the model for FP8 weights, if it has any; return what it computes with, for its fingerprint."""
    if not isinstance(weights, Fp8Checkpoint):
        return dtype
    reason = why_converted(setting, DTYPES[dtype], device, weights)
    if reason is not None:
        logger.info("weights are converted from FP8 to %s: %s", dtype, reason)
        return dtype
    prepare(model, weights, group)
    return f"{dtype}+fp8"


def _load_from_transformers(
    folder: Path,
    raw: RawConfig,
    checkpoint: Checkpoint,
    dtype: str,
    max_model_len: int | None,
    device: torch.device,
    group: RankGroup,
) -> LoadedModel:
    from engine.models.transformers_loading import TransformersCheckpoint

    architecture = str(architecture_name(raw))
    refuse_ranks(raw, group.size)
    name = resolve_dtype(dtype, raw, checkpoint)
    found = TransformersCheckpoint(folder, raw, architecture)
    length = model_length(max_model_len, found.num_positions)
    model, shape = found.load(DTYPES[name], device)
    info = _info(folder, raw, shape, length, name, has_head=True, numbers=name)
    return LoadedModel(model, shape, info)


def _info(
    folder: Path, raw: RawConfig, shape: ModelShape, length: int, dtype: str, has_head: bool, numbers: str
) -> ModelInfo:
    return ModelInfo(
        vocab_size=shape.vocab_size,
        max_model_len=length,
        eos_token_ids=read_eos_token_ids(folder, raw),
        fingerprint=model_fingerprint(folder, numbers),
        dtype=dtype,
        has_head=has_head,
        num_kv_heads=shape.num_kv_heads,
    )
