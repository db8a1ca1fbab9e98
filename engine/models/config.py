"""The shape of one decoder, read from a checkpoint's config.json and checked, and facts of a loaded one. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from contract.errors import SettingError
from contract.layout import KEY_VALUE
from contract.state_layout import StateLayout

RawConfig = Mapping[str, Any]
# Also keeps out what is no number, or infinite.
_MAX_FLOAT = 1e30
MAX_LAYERS = 4096
"""Layers are objects of their own, made before their weights are looked for; models have 130 of them at most."""
MAX_SIZE = 2**31 - 1
# Up to this number, layers cost too little for a check.
_FEW_LAYERS = 128
_NUM_LAYERS = frozenset({"num_hidden_layers", "num_layers", "n_layer", "n_layers"})
_COUNTS = ("layer", "expert", "head", "block")
# Fields that a library's own error message would not name.
_SIZES = frozenset(
    """vocab_size hidden_size intermediate_size head_dim num_attention_heads num_key_value_heads
    max_position_embeddings""".split()
)


class Head(Enum):
    """The layer that computes logits. OWN: a layer of its own. TIED: the embedding. NONE: there are no logits."""

    OWN = auto()
    TIED = auto()
    NONE = auto()


@dataclass(frozen=True)
class RopeConfig:
    """The parameters that map positions to angles.

    rope_type: "default"; "linear" divides every frequency by ``factor``; "llama3" divides the low ones, keeps the
    high ones, and blends between wavelengths of ``original_max_position_embeddings`` / high_ and / low_freq_factor;
    "yarn" blends between the dimensions that turn ``beta_fast`` and ``beta_slow`` times within the original length;
    "dynamic" raises theta for a longest context (``length``) beyond the original one; "longrope" divides each frequency by
    its own factor: one of ``short_factors`` up to the original length, else one of ``long_factors``.
    attention_factor: multiplies cosines and sines. truncate: yarn's dimensions are whole numbers.
    """

    rope_type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    length: int = 0

    def lengths(self, num_positions: int) -> tuple[int, int]:
        """See ``context_lengths``."""
        return context_lengths(
            self.rope_type, num_positions, self.original_max_position_embeddings, self.factor
        )

    def angles(self, length: int) -> str:
        """See ``name_angles``."""
        return name_angles(self.rope_type, self.original_max_position_embeddings, length)


class OtherRopeError(SettingError):
    """Angles that our own decoder cannot compute, and a model of transformers perhaps can."""


def context_lengths(rope_type: str, num_positions: int, original: int, factor: float) -> tuple[int, int]:
    """Return the longest context without a setting, and the longest that a setting may ask for, in tokens.

    With "longrope" a context beyond the original length changes the angles of all tokens, so it has to be asked for.
    """
    if rope_type == "longrope":
        return min(num_positions, original), num_positions
    if rope_type in ("yarn", "dynamic"):
        return num_positions, max(num_positions, int(factor * original))
    return num_positions, num_positions


def name_angles(rope_type: str, original: int, length: int) -> str:
    """Return a name of angles that depend on the longest context, for the fingerprint of the KV; empty for all others."""
    if length <= original or rope_type not in ("longrope", "dynamic"):
        return ""
    return "+long-rope" if rope_type == "longrope" else f"+rope-of-{length}"


class KVShape(NamedTuple):
    """The KV of a layer: its parts (``KVLayout``), of each token and KV head, and the numbers of a part."""

    parts: tuple[str, ...]
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a decoder that the engine needs: vocabulary, KV heads and number of positions.

    num_layers: those with KV of their own, without recurrent ones. kv_parts, num_kv_heads, head_dim: see ``KVShape``; of the
    first layer if ``kv_shapes`` has one for each layer, since they differ. sliding_windows: per layer, the number of tokens
    that a token sees, itself included; None is all. states: what recurrent layers keep.
    """

    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    kv_parts: tuple[str, ...] = field(default=KEY_VALUE, kw_only=True)
    sliding_windows: tuple[int | None, ...] = field(kw_only=True)
    states: StateLayout | None = field(default=None, kw_only=True)
    kv_shapes: tuple[KVShape, ...] = field(default=(), kw_only=True)

    def kv_shape(self, layer: int) -> KVShape:
        """Return the shape of a layer's KV."""
        return (
            self.kv_shapes[layer]
            if self.kv_shapes
            else KVShape(self.kv_parts, self.num_kv_heads, self.head_dim)
        )

    def cache_shape(self, num_blocks: int, block_size: int, layer: int = 0) -> tuple[int, ...]:
        """Return the axes of one layer's part of a pool."""
        shape = self.kv_shape(layer)
        return num_blocks, len(shape.parts), shape.num_kv_heads, block_size, shape.head_dim


@dataclass(frozen=True)
class Experts:
    """A layer's experts. num_active: of each token. width: of an expert's MLP. normalises: a token's weights sum to 1."""

    num: int
    num_active: int
    width: int
    normalises: bool

    def __post_init__(self) -> None:
        """Raise SettingError if a token cannot have that many experts."""
        if self.num_active > self.num:
            raise bad_config(f"num_experts_per_tok is {self.num_active}, and num_experts {self.num}")


@dataclass(frozen=True)
class DecoderConfig(ModelShape):
    """A decoder of the Llama family, with the variations of the related families.

    qkv_bias, output_bias: biases of the q/k/v and of the output projection. qk_norm: RMSNorm over each head's query
    and key (Qwen3). experts: those of each layer that has them instead of an MLP, which are the ``sparse_layers``.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    sparse_layers: frozenset[int] = frozenset()

    def experts_of(self, layer: int) -> Experts | None:
        """Return the experts of a layer; None if it has an MLP."""
        return self.experts if layer in self.sparse_layers else None

    def check_spread(self, num_ranks: int) -> None:
        """Raise SettingError if the experts cannot be spread over this many data-parallel ranks."""
        check_spread(self.experts.num if self.experts is not None and self.sparse_layers else 0, num_ranks)

    def __post_init__(self) -> None:
        """Raise SettingError if the numbers cannot describe a decoder."""
        if self.num_heads % self.num_kv_heads:
            raise bad_config(
                f"num_attention_heads is {self.num_heads}; it must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise bad_config(f"head_dim is {self.head_dim}; rotary embeddings need an even one")


def bad_config(what: str) -> SettingError:
    """Make the error for a config.json that cannot be served."""
    return SettingError(f"the model's config.json: {what}", param="model")


def check_spread(num_experts: int, num_ranks: int) -> None:
    """Raise SettingError if the experts of each layer cannot be spread over this many data-parallel ranks."""
    if num_ranks == 1:
        return
    if not num_experts:
        raise SettingError(
            f"data_parallel_size is {num_ranks}, and the model has no experts that can be spread over the ranks: "
            "run more workers instead, which need not step together",
            param="data_parallel_size",
        )
    if num_ranks > num_experts:
        raise SettingError(
            f"data_parallel_size is {num_ranks}, and the model has {num_experts} experts; each rank needs one",
            param="data_parallel_size",
        )


def unserved(architecture: str, reason: str) -> SettingError:
    """Return the error for a decoder of transformers that would give wrong answers here."""
    return SettingError(f"model: transformers' {architecture} is not served: {reason}", param="model")


def check_counts(raw: RawConfig, num_tensors: int) -> None:
    """Raise SettingError if config.json requires more parts than a model or this checkpoint can have.

    The libraries allocate the parts, or lists of them, before they compare them with the weights.
    """
    for name, value in raw.items():
        if isinstance(value, Mapping):
            check_counts(value, num_tensors)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name in _SIZES and not 1 <= value <= MAX_SIZE:
            raise bad_config(f"{name} is {value!r:.40}; it must be a whole number within 1..{MAX_SIZE}")
        if is_number and any(count in name for count in _COUNTS) and not -MAX_SIZE <= value <= MAX_SIZE:
            raise bad_config(f"{name} is {value!r:.40}; it must lie within 1..{MAX_SIZE}")
        if is_number and "layer" in name and "size" not in name and value > MAX_LAYERS:
            raise bad_config(f"{name} is {value!r:.40}; at most {MAX_LAYERS} are served")
        if is_number and name in _NUM_LAYERS and value > max(num_tensors, _FEW_LAYERS):
            raise bad_config(f"{name} is {value!r:.40}; the checkpoint has {num_tensors} tensors")


def positive_int(raw: RawConfig, name: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
    """Return a whole number from 1 to ``limit``. Without ``default`` the field is required; null counts as missing."""
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise bad_config(f"{name} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise bad_config(f"{name} is {value!r:.80}; it must be a whole number above 0")
    if value > limit:
        raise bad_config(f"{name} is {value}; at most {limit} are served")
    return value


def flag(raw: RawConfig, name: str) -> bool:
    """Return a boolean field, False if it is missing."""
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_config(f"{name} is {value!r}; it must be true or false")
    return bool(value)


def positive_float(raw: RawConfig, name: str, default: float | None = None) -> float:
    """Return a number above 0."""
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_FLOAT:
        raise bad_config(f"{name} is {value!r:.80}; it must be a number above 0")
    return float(value)


@dataclass(frozen=True)
class ModelInfo:
    """The model as it was loaded.

    max_model_len: maximum length of prompt and answer together, in tokens. eos_token_ids: the model's own end tokens.
    fingerprint: ``contract.layout.model_fingerprint``. dtype, kv_dtype: of the computation and of the KV. has_head:
    tokens can be sampled; a model without a head gives embeddings only. num_kv_heads: of all ranks together, each counted
    once; 0: those of the KV layout, on one rank. states: of recurrent layers; None without any.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    dtype: str
    kv_dtype: str
    has_head: bool = True
    num_kv_heads: int = 0
    states: StateLayout | None = None
