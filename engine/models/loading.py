"""Load a model that is ready to run, and its properties, from a checkpoint folder."""

import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from contract.errors import SettingError
from contract.layout import model_fingerprint, resolve_kv_dtype
from engine.distributed.group import RankGroup, SingleRank
from engine.fp8.linear import prepare, why_dequantized
from engine.fp8.stored import Fp8Checkpoint
from engine.models.checkpoint import (
    Checkpoint,
    Weights,
    check_tensors,
    describe_model,
    read_config,
    read_eos_token_ids,
)
from engine.models.config import Head, ModelInfo, ModelShape, RawConfig, check_counts
from engine.models.experts import SparseMLP, TokenExchange
from engine.models.language_model import LanguageModel
from engine.models.load_progress import LoadProgress
from engine.models.registry import architecture_name, find_architecture
from engine.models.served import model_length, plan_own, refuse_ranks, text_part
from engine.models.sharding import Part, config_of_rank, part_of
from engine.quantisation.stored import QuantisedCheckpoint, open_weights, read_scheme

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_weights(
    model: nn.Module,
    checkpoint: Weights,
    device: torch.device,
    part_of: Callable[[str], Part | None] = lambda _: None,
    elsewhere: Set[str] = frozenset(),
) -> None:
    """Replace each parameter of ``model`` (usually on the meta device) by the checkpoint's tensor, in the parameter's dtype.

    part_of: the part of a tensor to read by its name; None is all of it. elsewhere: tensors that other ranks have.

    Each tensor is read once and put in place before the next. On the host, weights already in that dtype stay backed by the
    memory map, so that several workers of one machine share them; they are read at first use. Raises SettingError that names
    missing, unexpected and misshapen tensors, and numbers without their scale, before anything is read.
    """
    wanted = dict(model.named_parameters())
    parts = {name: part_of(name) for name in wanted}
    shapes = {
        name: list(wanted[name].shape) if part is None else part.whole_shape(wanted[name].shape)
        for name, part in parts.items()
    }
    # A parameter of one byte is an FP8 weight: its numbers mean nothing without their scale.
    have_scales = {name for name in wanted if wanted[name].dtype.itemsize == 1}
    check_tensors(shapes, checkpoint, have_scales, elsewhere)
    num_bytes = sum(parameter.nbytes for parameter in wanted.values())
    with LoadProgress(num_bytes) as progress:
        for name, part in parts.items():
            tensor = checkpoint.tensor(name) if part is None else checkpoint.part(name, part)
            owner = model.get_submodule(name.rpartition(".")[0])
            # One tensor after the other: on a device, the host never holds more than one of them.
            loaded = tensor.to(device=device, dtype=wanted[name].dtype).contiguous()
            owner.register_parameter(name.rpartition(".")[2], nn.Parameter(loaded, requires_grad=False))
            progress.advance(loaded.nbytes)


@dataclass(frozen=True)
class LoadedModel:
    """One rank's part of a model, with its weights on the device.

    config: that part; info: the whole model; group: the ranks that have all parts. exchange: the engines that have the other
    experts. facts: see ``describe_model``, when it was loaded.
    """

    model: LanguageModel
    config: ModelShape
    info: ModelInfo
    group: RankGroup = SingleRank()  # noqa: RUF009 - it has no state
    exchange: TokenExchange | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def load(
    folder: Path,
    dtype: str,
    max_model_len: int | None,
    device: torch.device,
    group: RankGroup | None = None,
    fp8_products: str = "auto",
    exchange: TokenExchange | None = None,
    kv_cache_dtype: str = "auto",
) -> LoadedModel:
    """Read the folder and put the model, or the part of a rank of ``group``, on ``device``.

    fp8_products, kv_cache_dtype: see ``engine.options``. exchange: the ranks over which the experts are spread.

    Raises SettingError for a folder that cannot be served, for a ``max_model_len`` beyond the model's positions, and for
    KV that cannot hold its values.
    """
    group = group or SingleRank()
    raw = read_config(folder)
    checkpoint = Checkpoint(folder)
    check_counts(raw, len(checkpoint.names()))
    architecture = find_architecture(raw)
    if architecture is None:
        return _load_from_transformers(
            folder, raw, checkpoint, dtype, kv_cache_dtype, max_model_len, device, group, exchange
        )
    plan = plan_own(folder, raw, architecture, checkpoint, dtype, max_model_len)
    plan.config.check_spread(1 if exchange is None else exchange.size)
    of_rank = config_of_rank(plan.config, group.size)
    # Before minutes of reading weights.
    kv_dtype = resolve_kv_dtype(kv_cache_dtype, plan.dtype)
    group.check_dtype(DTYPES[plan.dtype])
    # Without memory: ``load_weights`` puts each tensor of the checkpoint in the place of a parameter.
    with torch.device("meta"):
        model = architecture.build(of_rank, plan.head, group).to(DTYPES[plan.dtype])
    all_names = {name for name, _ in model.named_parameters()}
    if exchange is not None:
        for module in list(model.modules()):
            if isinstance(module, SparseMLP):
                module.spread(exchange)
    elsewhere = all_names - {name for name, _ in model.named_parameters()}
    numbers = _numbers(model, plan.weights, plan.dtype, device, group, fp8_products)
    load_weights(model, plan.weights, device, lambda tensor: part_of(tensor, plan.config, group), elsewhere)
    model.place(device)
    has_head = plan.head is not Head.NONE
    angles = plan.config.rope.angles(plan.length)
    info = _info(folder, raw, plan.config, plan.length, plan.dtype, kv_dtype, has_head, numbers, angles)
    return LoadedModel(model.eval(), of_rank, info, group, exchange, describe_model(folder))


def _numbers(
    model: LanguageModel, weights: Weights, dtype: str, device: torch.device, group: RankGroup, setting: str
) -> str:
    """Prepare the model for FP8 weights, if it has any; return what it computes with, for its fingerprint."""
    if isinstance(weights, QuantisedCheckpoint):
        name = weights.scheme.describe()
        if setting == "on":
            raise SettingError(
                f"fp8_products is on, but weights in {name} are dequantised at load; set it to auto",
                param="fp8_products",
            )
        logger.info("weights are dequantised from %s to %s", name, dtype)
    if not isinstance(weights, Fp8Checkpoint):
        return dtype
    reason = why_dequantized(setting, DTYPES[dtype], device, weights)
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
    kv_cache_dtype: str,
    max_model_len: int | None,
    device: torch.device,
    group: RankGroup,
    exchange: TokenExchange | None,
) -> LoadedModel:
    from engine.models.transformers_loading import TransformersCheckpoint

    architecture = str(architecture_name(raw))
    refuse_ranks(raw, group.size)
    part = text_part(raw)
    scheme = read_scheme(part)
    found = TransformersCheckpoint(folder, raw, architecture, 1 if exchange is None else exchange.size)
    weights, name = open_weights(checkpoint, scheme, part, dtype)
    kv_dtype = resolve_kv_dtype(kv_cache_dtype, name)
    length = model_length(max_model_len, found.num_positions, found.max_positions)
    dequantised = None if weights is checkpoint else weights
    model, shape = found.load(DTYPES[name], device, length, dequantised, exchange)
    angles = found.angles(length)
    info = _info(folder, part, shape, length, name, kv_dtype, True, name, angles)
    return LoadedModel(model, shape, info, exchange=exchange, facts=describe_model(folder))


def _info(
    folder: Path,
    raw: RawConfig,
    shape: ModelShape,
    length: int,
    dtype: str,
    kv_dtype: str,
    has_head: bool,
    numbers: str,
    angles: str,
) -> ModelInfo:
    """Return the facts. numbers: what the model computes with. angles: a name of angles that the longest context changes."""
    if kv_dtype != dtype:  # each layer gets what those before computed from rounded KV
        numbers = f"{numbers}+{kv_dtype}-kv"
    return ModelInfo(
        vocab_size=shape.vocab_size,
        max_model_len=length,
        eos_token_ids=read_eos_token_ids(folder, raw),
        # With the weights, not with the dtype: KV of other angles cannot be converted.
        fingerprint=model_fingerprint(folder, numbers).replace("@", f"{angles}@", 1),
        dtype=dtype,
        kv_dtype=kv_dtype,
        has_head=has_head,
        num_kv_heads=shape.num_kv_heads,
        states=shape.states,
    )
