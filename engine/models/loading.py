"""From a checkpoint folder to a model that is ready to run, and what the engine must know of it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from contract.errors import SettingError
from contract.layout import model_fingerprint
from engine.checkpoint import DTYPES, Checkpoint, load_weights, read_config, read_eos_token_ids, resolve_dtype
from engine.models.config import DecoderConfig
from engine.models.decoder import CausalLM
from engine.models.info import ModelInfo
from engine.models.registry import decoder_config
from engine.models.sharding import config_of_rank, part_of
from engine.ranks.group import RankGroup, SingleRank

HEAD_NAME = "lm_head.weight"


@dataclass(frozen=True)
class LoadedModel:
    """One rank's part of a model, with its weights on the device. config: of that part; info: of the whole."""

    model: CausalLM
    config: DecoderConfig
    info: ModelInfo


def load(
    folder: Path,
    dtype: str,
    max_model_len: int | None,
    device: torch.device,
    group: RankGroup | None = None,
) -> LoadedModel:
    """Read the folder and put the model on ``device``, or what a rank of ``group`` has of it.

    The output head is the embedding where the configuration ties them and the checkpoint has no head of its own.
    Raises SettingError for a folder that cannot be served, for a ``max_model_len`` beyond the model's positions, and
    for a model that does not divide by the number of ranks.
    """
    group = group or SingleRank()
    raw = read_config(folder)
    config = decoder_config(raw)
    of_rank = config_of_rank(config, group.size)
    length = _model_length(max_model_len, config)
    checkpoint = Checkpoint(folder)
    name = resolve_dtype(dtype, raw, checkpoint)
    with torch.device("meta"):
        is_tied = config.tie_word_embeddings and HEAD_NAME not in checkpoint.names()
        model = CausalLM(of_rank, is_tied, group)
    load_weights(model, checkpoint, DTYPES[name], device, lambda tensor: part_of(tensor, group))
    model.model.frequencies = model.model.frequencies.to(device)
    info = ModelInfo(
        vocab_size=config.vocab_size,
        max_model_len=length,
        eos_token_ids=read_eos_token_ids(folder, raw),
        fingerprint=model_fingerprint(folder, name),
        dtype=name,
    )
    return LoadedModel(model.eval(), of_rank, info)


def _model_length(setting: int | None, config: DecoderConfig) -> int:
    limit = config.max_position_embeddings
    if setting is not None and setting > limit:
        raise SettingError(
            f"max_model_len is {setting}; the model has {limit} positions, so it must lie in 2..{limit}",
            param="max_model_len",
        )
    return setting or limit
