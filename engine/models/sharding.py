"""The part of the model that one rank of a tensor-parallel group holds (Shoeybi et al. 2019, Megatron-LM).

Attention heads, the MLP's width and the vocabulary are split into equal parts. A widening layer (q, k, v, gate, up, the
output head) is split by rows and needs no communication. The narrowing layer behind it (o, down) is split by columns, and
the ranks sum their results. A group of one uses torch's own layers.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contract.errors import SettingError
from engine.distributed.group import RankGroup
from engine.models.config import DecoderConfig


@dataclass(frozen=True)
class Part:
    """One of ``size`` equal parts along dimension ``dim`` of a checkpoint's tensor, the ``index``-th."""

    dim: int
    index: int
    size: int

    def of(self, length: int) -> slice:
        """Return the part's range in a dimension of this length."""
        share = length // self.size
        return slice(self.index * share, (self.index + 1) * share)

    def whole_shape(self, shape: torch.Size) -> list[int]:
        """Return the shape of the whole tensor whose part has ``shape``."""
        return [length * self.size if dim == self.dim else length for dim, length in enumerate(shape)]


class RowParallelLinear(nn.Linear):
    """A linear layer of which each rank has a range of inputs; the ranks' results are summed, then the bias is added."""

    def __init__(self, num_inputs: int, num_outputs: int, bias: bool, group: RankGroup) -> None:
        super().__init__(num_inputs, num_outputs, bias=bias)
        self._group = group

    def forward(self, states: Tensor) -> Tensor:
        """Map this rank's ``[num_tokens, num_inputs / size]`` to ``[num_tokens, num_outputs]``, equal on all ranks."""
        output = self._group.add_up(F.linear(states, self.weight))
        return output if self.bias is None else output + self.bias


class VocabularyParallelEmbedding(nn.Embedding):
    """An embedding of which each rank has a range of token ids; other ranks' tokens count as zeros."""

    def __init__(self, num_embeddings: int, size: int, group: RankGroup) -> None:
        super().__init__(num_embeddings, size)
        self._group = group

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map token ids ``[num_tokens]`` to ``[num_tokens, size]``, equal on all ranks."""
        local = input_ids - self._group.rank * self.num_embeddings
        is_elsewhere = (local < 0) | (local >= self.num_embeddings)
        states = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight)
        return self._group.add_up(states.masked_fill(is_elsewhere[:, None], 0))


def row_parallel(num_inputs: int, num_outputs: int, bias: bool, group: RankGroup) -> nn.Linear:
    """Make the layer behind a split one; ``num_inputs`` are this rank's."""
    if group.size == 1:
        return nn.Linear(num_inputs, num_outputs, bias=bias)
    return RowParallelLinear(num_inputs, num_outputs, bias, group)


def embedding(num_embeddings: int, size: int, group: RankGroup) -> nn.Embedding:
    """Make the embedding of this rank's ``num_embeddings`` token ids."""
    if group.size == 1:
        return nn.Embedding(num_embeddings, size)
    return VocabularyParallelEmbedding(num_embeddings, size, group)


def config_of_rank(config: DecoderConfig, size: int) -> DecoderConfig:
    """Return the decoder that one of ``size`` ranks computes: its share of heads, MLP width and vocabulary.

    Raises SettingError that names the sizes that do not divide. (Heads divide if the KV heads do: they are a multiple.)
    """
    counts = {
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    if uneven := [f"{name} {count}" for name, count in counts.items() if count % size]:
        raise SettingError(
            f"tensor_parallel_size is {size}; it must divide the model's {' and '.join(uneven)} "
            f"({config.num_heads} attention heads share {config.num_kv_heads} key/value heads)",
            param="tensor_parallel_size",
        )
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
        vocab_size=config.vocab_size // size,
    )


_ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")
_WHOLE = (
    "norm.weight",
    "o_proj.bias",
    "down_proj.bias",
    "o_proj.weight_scale",
    "down_proj.weight_scale",
    "input_scale",
)


def part_of(name: str, group: RankGroup) -> Part | None:
    """Return the part of the tensor ``name`` that this rank holds; None is all of it."""
    if group.size == 1 or name.endswith(_WHOLE):
        return None
    return Part(1 if name.endswith(_ROW_PARALLEL) else 0, group.rank, group.size)
