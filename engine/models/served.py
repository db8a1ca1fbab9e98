"""Decide from a model folder, without torch and without reading weights, whether and how the engine serves it.

``kvbaton check`` prints the answer, a service asks before it starts a process, and the loader builds the model by it.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from contract.cache_layout import CacheLayout
from contract.decoding import converter
from contract.errors import SettingError
from contract.layout import DTYPE_BYTES, KEY_VALUE, KVLayout, resolve_kv_dtype
from contract.state_layout import StateLayout
from engine.kv_cache.shares import group_layers
from engine.models.checkpoint import (
    DTYPE_NAMES,
    HEAD_NAME,
    Checkpoint,
    Weights,
    check_tensors,
    read_config,
)
from engine.models.config import (
    DecoderConfig,
    Head,
    KVShape,
    RawConfig,
    bad_config,
    check_counts,
    check_spread,
)
from engine.models.registry import Architecture, architecture_name, find_architecture
from engine.options import KVCacheOptions
from engine.quantisation.stored import AnyScheme, describe_weights, open_weights, read_scheme

_PROGRAM = "engine.models.facts_program"
_STATES_PROGRAM = "engine.models.states_program"
# Reading takes a second, making a large model some; other processes may have all cores.
_PROGRAM_SECONDS = 300.0
_EXPERTS = ".experts."
"""A part of the names of experts' tensors."""
_to_shapes = converter(list[KVShape])
_to_states = converter(StateLayout)
_OTHER_PARTS = re.compile("vision|visual|image|audio|multi_modal_projector")
"""A part of the names of tensors that text does not pass through."""


@dataclass(frozen=True)
class OwnModel:
    """A folder that our own decoder serves. length: the longest context. head: its output layer. scheme: of the weights."""

    architecture: Architecture
    config: DecoderConfig
    head: Head
    scheme: AnyScheme | None
    weights: Weights
    dtype: str
    length: int


@dataclass(frozen=True)
class Served:
    """The way in which the engine serves a folder.

    is_own: our own decoder computes it, else transformers. is_tried: False for a type of transformers that no version of
    this engine has loaded, so that its start decides. dtype, kv_dtype: of the computation and of the KV; None where neither
    config.json nor the weights name one. is_text_of_more: the model takes images or sounds, too, and its text is served.
    has_states: it has recurrent layers. quantisation: None without. num_weight_bytes: of the weights in that dtype; None if
    unknown. num_expert_bytes: those of them that are experts' of layers whose experts can be spread over ranks.
    cache: of all layers with KV, in blocks of the default size, and the states of recurrent layers if they were asked for;
    None if unknown. has_weights: False if there is config.json alone.
    """

    architecture: str
    is_own: bool
    is_tried: bool
    dtype: str | None
    kv_dtype: str | None
    quantisation: str | None
    num_weight_bytes: int | None
    cache: CacheLayout | None
    max_model_len: int
    has_weights: bool
    num_expert_bytes: int = 0
    is_text_of_more: bool = False
    has_states: bool = False

    @property
    def kv_bytes_per_token(self) -> int | None:
        """Bytes over all layers; None if unknown."""
        return None if self.cache is None else self.cache.token_bytes

    def rank_weight_bytes(self, num_ranks: int, data_parallel_size: int) -> int | None:
        """Return about how many bytes of weights each process of a worker, or of a data-parallel group, has."""
        if self.num_weight_bytes is None:
            return None
        elsewhere = self.num_expert_bytes * (data_parallel_size - 1) // data_parallel_size
        return (self.num_weight_bytes - elsewhere) // num_ranks


def examine(
    folder: Path,
    dtype: str = "auto",
    max_model_len: int | None = None,
    num_ranks: int = 1,
    kv_cache_dtype: str = "auto",
    data_parallel_size: int = 1,
    *,
    finds_states: bool = False,
) -> Served:
    """Return how the engine serves a folder, with weights or with config.json alone. Needs kvbaton[worker], not torch.

    num_ranks: processes of a worker. data_parallel_size: workers of a group. finds_states: with the shapes of its states,
    for which the model is made without weights, in a process with torch.

    Raises SettingError, whose text is that of the loader, for one that it refuses. Takes less than a second where
    transformers reads the configuration, in a process of its own, and several to find states.
    """
    raw = read_config(folder)
    has_weights = any(folder.glob("*.safetensors"))
    checkpoint = Checkpoint(folder, "numpy") if has_weights else None
    if checkpoint is not None:
        check_counts(raw, len(checkpoint.names()))
    architecture = find_architecture(raw)
    if architecture is None:
        refuse_ranks(raw, num_ranks)
        served = _examine_transformers(
            folder, raw, checkpoint, dtype, kv_cache_dtype, max_model_len, data_parallel_size
        )
        return _with_states(folder, served) if finds_states and served.has_states else served
    architecture.read_config(raw).check_spread(data_parallel_size)
    return _examine_own(folder, raw, architecture, checkpoint, dtype, kv_cache_dtype, max_model_len)


def plan_own(
    folder: Path,
    raw: RawConfig,
    architecture: Architecture,
    checkpoint: Checkpoint,
    dtype: str,
    max_model_len: int | None,
) -> OwnModel:
    """Return how our own decoder serves a folder. Raises SettingError for one that it cannot serve.

    The embedding is the output head if the configuration ties them and the checkpoint has no separate head. A decoder
    that was saved alone, or by sentence-transformers, needs no head: it gives embeddings only.
    """
    scheme = read_scheme(raw)
    weights, name = open_weights(checkpoint, scheme, raw, dtype)
    config = architecture.read_config(raw)
    length = model_length(max_model_len, *config.rope.lengths(config.max_position_embeddings))
    config = replace(config, rope=replace(config.rope, length=length))
    head = _head(folder, config, weights)
    # Embedding models use code of their own for bidirectional attention, which config.json does not show.
    has_own_code = "AutoModel" in (raw.get("auto_map") or {}) and raw.get("is_causal") is not True
    if head is Head.NONE and has_own_code:
        raise bad_config(
            "auto_map names code of the model's own, which is not run; where its attention is causal, set is_causal to "
            "true there"
        )
    check_tensors(architecture.shapes(config, head), weights)
    return OwnModel(architecture, config, head, scheme, weights, name, length)


def refuse_ranks(raw: RawConfig, num_ranks: int) -> None:
    """Raise SettingError for several ranks of a model that transformers computes."""
    if num_ranks > 1:
        raise SettingError(
            f"tensor_parallel_size is {num_ranks}; {architecture_name(raw)} is computed by transformers, on one rank alone",
            param="tensor_parallel_size",
        )


def model_length(setting: int | None, default: int, limit: int) -> int:
    """Return the longest context. Raises SettingError if the setting is beyond ``limit``, the model's positions."""
    if setting is not None and setting > limit:
        raise SettingError(
            f"max_model_len is {setting}; the model has {limit} positions, so it must lie in 2..{limit}",
            param="max_model_len",
        )
    return setting or default


def _examine_own(
    folder: Path,
    raw: RawConfig,
    architecture: Architecture,
    checkpoint: Checkpoint | None,
    dtype: str,
    kv_cache_dtype: str,
    max_model_len: int | None,
) -> Served:
    name: str | None
    if checkpoint is not None:
        own = plan_own(folder, raw, architecture, checkpoint, dtype, max_model_len)
        config = own.config
        name = own.dtype
        head = own.head
        scheme = own.scheme
    else:
        scheme = read_scheme(raw)
        config = architecture.read_config(raw)
        name = _named_dtype(dtype, raw)
        head = Head.TIED if config.tie_word_embeddings else Head.OWN
    length = model_length(max_model_len, *config.rope.lengths(config.max_position_embeddings))
    shapes = [KVShape(KEY_VALUE, config.num_kv_heads, config.head_dim)] * config.num_layers
    counts = {each: prod(shape) for each, shape in architecture.shapes(config, head).items()}
    kv_dtype = name and resolve_kv_dtype(kv_cache_dtype, name)
    num_of_experts = sum(number for each, number in counts.items() if _EXPERTS in each)
    return Served(
        architecture=str(architecture_name(raw)),
        is_own=True,
        is_tried=True,
        dtype=name,
        kv_dtype=kv_dtype,
        quantisation=describe_weights(scheme, name, is_own=True),
        num_weight_bytes=_bytes(sum(counts.values()), name),
        num_expert_bytes=_bytes(num_of_experts, name) or 0,
        cache=_cache(shapes, kv_dtype, config.sliding_windows, length),
        max_model_len=length,
        has_weights=checkpoint is not None,
    )


def _examine_transformers(
    folder: Path,
    raw: RawConfig,
    checkpoint: Checkpoint | None,
    dtype: str,
    kv_cache_dtype: str,
    max_model_len: int | None,
    data_parallel_size: int,
) -> Served:
    weights: Weights | None = None
    part = text_part(raw)
    # The order of the loader: what the configuration refuses is refused before the headers of a hundred files are read.
    scheme = read_scheme(part)
    facts = _answer(folder, _PROGRAM)
    check_spread(facts["num_experts"], data_parallel_size)
    if checkpoint is None:
        name = _named_dtype(dtype, part)
    else:
        weights, name = open_weights(checkpoint, scheme, part, dtype)
    shapes = None if facts["kv_shapes"] is None else _to_shapes(facts["kv_shapes"])
    kv_dtype = name and resolve_kv_dtype(kv_cache_dtype, name)
    length = model_length(max_model_len, facts["num_positions"], facts["max_positions"])
    num_numbers = None
    num_of_experts = 0
    if weights is not None:
        names = {each for each in weights.names() if not weights.is_spare(each)}
        if facts["is_composite"]:
            names = {each for each in names if not _OTHER_PARTS.search(each)}
        if facts["unread"]:
            unread = re.compile("|".join(facts["unread"]))
            names = {each for each in names if not unread.search(each)}
        num_numbers = sum(prod(weights.shape(each)) for each in names)
        num_of_experts = sum(prod(weights.shape(each)) for each in names if _EXPERTS in each)
    return Served(
        architecture=str(architecture_name(raw)),
        is_own=False,
        is_tried=facts["is_tried"],
        dtype=name,
        kv_dtype=kv_dtype,
        quantisation=describe_weights(scheme, name, is_own=False),
        num_weight_bytes=_bytes(num_numbers, name),
        num_expert_bytes=_bytes(num_of_experts, name) or 0,
        cache=_cache(shapes, kv_dtype, facts["windows"], length),
        max_model_len=length,
        has_weights=checkpoint is not None,
        is_text_of_more=facts["is_composite"],
        has_states=facts["has_states"],
    )


def _with_states(folder: Path, served: Served) -> Served:
    """Return the same with the states of the recurrent layers."""
    if served.cache is None or served.dtype is None:
        return served
    found = _answer(folder, _STATES_PROGRAM, served.dtype)["states"]
    return replace(served, cache=msgspec.structs.replace(served.cache, states=found and _to_states(found)))


def text_part(raw: RawConfig) -> RawConfig:
    """Return config.json with the fields of its ``text_config``, if it has one, in the place of those of the whole."""
    part = raw.get("text_config")
    return {**raw, **part} if isinstance(part, dict) else raw


def _answer(folder: Path, program: str, *arguments: str) -> dict[str, Any]:
    """Return what a program about a folder prints. Raises SettingError with its text, and if it fails."""
    # A process of its own: transformers imports torch beside a configuration, and this one must stay small.
    command = [sys.executable, "-P", "-m", program, str(folder), *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_PROGRAM_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise SettingError(f"model: transformers cannot read {folder}: {error}", param="model") from error
    found: dict[str, Any] = json.loads(ended.stdout)
    if "problem" in found:
        raise SettingError(found["problem"], param="model")
    return found


def _named_dtype(setting: str, raw: RawConfig) -> str | None:
    """Return the dtype without weights; None if config.json names none."""
    if setting != "auto":
        return setting
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch.")
    return name if name in DTYPE_NAMES else None


def _cache(
    shapes: Sequence[KVShape] | None, dtype: str | None, windows: Sequence[int | None], max_model_len: int
) -> CacheLayout | None:
    """Return the groups of layers. shapes, windows: of each layer that keeps KV. Raises SettingError as the engine does."""
    if shapes is None or dtype is None:
        return None
    layouts = [
        KVLayout(
            num_layers=1,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=KVCacheOptions.model_fields["block_size"].default,
            dtype=dtype,
            parts=shape.parts,
        )
        for shape in shapes or [KVShape(KEY_VALUE, 1, 1)]
    ]
    return group_layers(layouts, windows, None, max_model_len)


def _bytes(num_numbers: int | None, dtype: str | None) -> int | None:
    return None if num_numbers is None or dtype is None else num_numbers * DTYPE_BYTES[dtype]


def _head(folder: Path, config: DecoderConfig, weights: Weights) -> Head:
    if HEAD_NAME in weights.names():
        return Head.OWN
    if weights.is_bare:
        return Head.NONE
    if config.tie_word_embeddings:
        return Head.TIED
    # sentence-transformers writes modules.json; without it, the missing head is named as a missing tensor.
    return Head.NONE if (folder / "modules.json").is_file() else Head.OWN
