"""Load a model that is ready to run, and its properties, from a checkpoint folder."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from contract.errors import SettingError
from contract.layout import model_fingerprint
from engine.distributed.group import RankGroup, SingleRank
from engine.fp8.choice import prepare, why_converted
from engine.fp8.scheme import read_scheme
from engine.fp8.stored import Fp8Checkpoint
from engine.models.checkpoint import (
    DTYPES,
    HEAD_NAME,
    Checkpoint,
    Weights,
    load_weights,
    read_config,
    read_eos_token_ids,
    resolve_dtype,
)
from engine.models.config import DecoderConfig, ModelShape, RawConfig, bad_config, check_counts
from engine.models.info import ModelInfo
from engine.models.language_model import Head, LanguageModel
from engine.models.registry import architecture_name, find_architecture
from engine.models.sharding import config_of_rank, part_of

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

    The embedding is the output head if the configuration ties them and the checkpoint has no separate head. A decoder
    that was saved alone, or by sentence-transformers, needs no head: it gives embeddings only.
    Raises SettingError for a folder that cannot be served, for a ``max_model_len`` beyond the model's positions, and
    for a model that does not divide by the number of ranks.
    """
    group = group or SingleRank()
    raw = read_config(folder)
    checkpoint = Checkpoint(folder)
    check_counts(raw, len(checkpoint.names()))
    architecture = find_architecture(raw)
    if architecture is None:
        return _load_from_transformers(folder, raw, checkpoint, dtype, max_model_len, device, group)
    scheme = read_scheme(raw)
    weights = checkpoint if scheme is None else Fp8Checkpoint(checkpoint, scheme)
    config = architecture.read_config(raw)
    of_rank = config_of_rank(config, group.size)
    length = _model_length(max_model_len, config.max_position_embeddings)
    name = resolve_dtype(dtype, raw, weights)
    group.check_dtype(DTYPES[name])
    with torch.device("meta"):
        head = _head(folder, config, checkpoint)
        if head is Head.NONE:
            _refuse_own_code(raw)
        model = architecture.build(of_rank, head, group).to(DTYPES[name])
    numbers = _numbers(model, weights, name, device, group, fp8_products)
    load_weights(model, weights, device, lambda tensor: part_of(tensor, group))
    model.place(device)
    info = _info(folder, raw, config.vocab_size, length, name, head is not Head.NONE, numbers)
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
    if group.size > 1:
        raise SettingError(
            f"tensor_parallel_size is {group.size}; {architecture} is computed by transformers, on one rank alone",
            param="tensor_parallel_size",
        )
    name = resolve_dtype(dtype, raw, checkpoint)
    found = TransformersCheckpoint(folder, raw, architecture)
    length = _model_length(max_model_len, found.num_positions)
    model, shape = found.load(DTYPES[name], device)
    info = _info(folder, raw, shape.vocab_size, length, name, has_head=True, numbers=name)
    return LoadedModel(model, shape, info)


def _info(
    folder: Path, raw: RawConfig, vocab_size: int, length: int, dtype: str, has_head: bool, numbers: str
) -> ModelInfo:
    return ModelInfo(
        vocab_size=vocab_size,
        max_model_len=length,
        eos_token_ids=read_eos_token_ids(folder, raw),
        fingerprint=model_fingerprint(folder, numbers),
        dtype=dtype,
        has_head=has_head,
    )


def _head(folder: Path, config: DecoderConfig, checkpoint: Checkpoint) -> Head:
    if HEAD_NAME in checkpoint.names():
        return Head.OWN
    if checkpoint.is_bare:
        return Head.NONE
    if config.tie_word_embeddings:
        return Head.TIED
    return Head.NONE if (folder / "modules.json").is_file() else Head.OWN


def _refuse_own_code(raw: RawConfig) -> None:
    """Refuse models with code of their own: embedding models use it for bidirectional attention, unseen in config.json."""
    if "AutoModel" in (raw.get("auto_map") or {}) and raw.get("is_causal") is not True:
        raise bad_config(
            "auto_map names code of the model's own, which is not run; where its attention is causal, set is_causal to "
            "true there"
        )


def _model_length(setting: int | None, limit: int) -> int:
    if setting is not None and setting > limit:
        raise SettingError(
            f"max_model_len is {setting}; the model has {limit} positions, so it must lie in 2..{limit}",
            param="max_model_len",
        )
    return setting or limit
