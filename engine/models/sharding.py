"""The part of the model that one rank of a tensor-parallel group holds (Shoeybi et al. 2019, Megatron-LM).

Attention heads, the MLP's width and the vocabulary are split into equal parts. A widening layer (q, k, v, gate, up, the
output head) is split by rows and needs no communication. The narrowing layer behind it (o, down) is split by columns, and
the ranks sum their results. A group of one uses torch's own layers.

Where the ranks do not divide a size, parts end with padding: rows of zeros, whose results the next layer multiplies by
columns of zeros, or, of the vocabulary, tokens that are left out wherever logits are read. KV heads are never padded:
neighbours hold the same ones (``contract.layout.heads_of_rank``), and divide the query heads that read them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contract.layout import heads_of_rank
from engine.distributed.group import RankGroup
from engine.models.config import DecoderConfig


@dataclass(frozen=True)
class Piece:
    """``count`` rows of a checkpoint's tensor from ``first`` on, which are a rank's rows from ``at`` on."""

    at: int
    first: int
    count: int

    @property
    def own(self) -> slice:
        """The range in the checkpoint's tensor."""
        return slice(self.first, self.first + self.count)


@dataclass(frozen=True)
class Part:
    """A rank's part of a checkpoint's tensor: ``size`` rows along ``dim``, which has ``whole``; zeros beside the pieces."""

    dim: int
    whole: int
    size: int
    pieces: tuple[Piece, ...]

    def assemble(self, read: Callable[[slice], Tensor]) -> Tensor:
        """Return the part of a tensor of which ``read`` returns a range along the dimension."""
        if len(self.pieces) == 1 and self.pieces[0].count == self.size:
            return read(self.pieces[0].own)
        found = [(piece, read(piece.own)) for piece in self.pieces]
        like = found[0][1] if found else read(slice(0, 1))
        shape = list(like.shape)
        shape[self.dim] = self.size
        part = torch.zeros(shape, dtype=like.dtype, device=like.device)
        for piece, content in found:
            part.narrow(self.dim, piece.at, piece.count).copy_(content)
        return part

    def whole_shape(self, shape: torch.Size) -> list[int]:
        """Return the shape of the whole tensor whose part has ``shape``."""
        return [self.whole if dim == self.dim else length for dim, length in enumerate(shape)]


class VocabularyParallelEmbedding(nn.Embedding):
    """An embedding of which each rank has a range of token ids; other ranks' tokens count as zeros.

    num_embeddings: of all ranks together.
    """

    def __init__(self, num_embeddings: int, size: int, group: RankGroup) -> None:
        super().__init__(share_of(num_embeddings, group.size), size)
        self._group = group

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map token ids ``[num_tokens]`` to ``[num_tokens, size]``, equal on all ranks."""
        local = input_ids - self._group.rank * self.num_embeddings
        # Their ids are looked up as 0 and zeroed, so that the shapes are those of every step: a graph can capture it.
        is_elsewhere = (local < 0) | (local >= self.num_embeddings)
        states = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight)
        return self._group.add_up(states.masked_fill(is_elsewhere[:, None], 0))


def embedding(num_embeddings: int, size: int, group: RankGroup) -> nn.Embedding:
    """Make a rank's embedding of the model's ``num_embeddings`` token ids."""
    if group.size == 1:
        return nn.Embedding(num_embeddings, size)
    return VocabularyParallelEmbedding(num_embeddings, size, group)


# Matrix units multiply numbers of rows and columns that are multiples of this.
_ALIGNMENT = 16


def share_of(count: int, size: int) -> int:
    """Return how many of ``count`` rows each of ``size`` ranks has; where they do not divide, whole tiles with padding."""
    if count % size == 0:
        return count // size
    return -(-count // (size * _ALIGNMENT)) * _ALIGNMENT


def config_of_rank(config: DecoderConfig, size: int) -> DecoderConfig:
    """Return the decoder that one of ``size`` ranks computes: its share of heads and MLP width, and the whole vocabulary."""
    num_kv_heads = len(heads_of_rank(config.num_kv_heads, size, 0))
    return replace(
        config,
        num_heads=num_kv_heads * _queries_of_head(config, size),
        num_kv_heads=num_kv_heads,
        intermediate_size=share_of(config.intermediate_size, size),
        experts=config.experts and replace(config.experts, width=share_of(config.experts.width, size)),
    )


def _queries_of_head(config: DecoderConfig, size: int) -> int:
    """Return the query heads that a rank computes for each of its KV heads, padding included."""
    fewest = min(len(_holders(config, size, head)) for head in range(config.num_kv_heads))
    return -(-config.num_heads // (config.num_kv_heads * fewest))


def _holders(config: DecoderConfig, size: int, head: int) -> list[int]:
    """Return the ranks that hold a KV head."""
    return [rank for rank in range(size) if head in heads_of_rank(config.num_kv_heads, size, rank)]


_ROW_PARALLEL = frozenset({"o_proj", "down_proj"})
_QUERIES = frozenset({"q_proj", "o_proj"})
_KV = frozenset({"k_proj", "v_proj"})
_WIDTH = frozenset({"gate_proj", "up_proj", "down_proj"})
_VOCABULARY = frozenset({"embed_tokens", "lm_head"})


def part_of(name: str, config: DecoderConfig, group: RankGroup) -> Part | None:
    """Return the part of the tensor ``name`` that this rank holds; None is all of it. config: of the whole model."""
    *_, layer, kind = name.split(".")
    dim = int(layer in _ROW_PARALLEL)
    if group.size == 1 or kind == "input_scale" or (dim and kind != "weight"):
        return None
    if layer in _QUERIES:
        return _query_part(dim, config, group)
    if layer in _KV:
        heads = heads_of_rank(config.num_kv_heads, group.size, group.rank)
        size = len(heads) * config.head_dim
        own = Piece(0, heads.start * config.head_dim, size)
        return Part(dim, config.num_kv_heads * config.head_dim, size, (own,))
    if layer in _WIDTH:
        is_of_expert = config.experts is not None and ".experts." in name
        width = config.experts.width if is_of_expert and config.experts else config.intermediate_size
        return _even_part(dim, width, group)
    return _even_part(dim, config.vocab_size, group) if layer in _VOCABULARY else None


def _even_part(dim: int, whole: int, group: RankGroup) -> Part:
    size = share_of(whole, group.size)
    first = min(group.rank * size, whole)
    count = min(size, whole - first)
    return Part(dim, whole, size, (Piece(0, first, count),) if count else ())


def _query_part(dim: int, config: DecoderConfig, group: RankGroup) -> Part:
    """Return the query heads of a rank: for each KV head its share of those that read it, then padding."""
    of_head = config.num_heads // config.num_kv_heads
    most = _queries_of_head(config, group.size)
    unit = config.head_dim
    pieces = list[Piece]()
    heads = heads_of_rank(config.num_kv_heads, group.size, group.rank)
    for place, head in enumerate(heads):
        holders = _holders(config, group.size, head)
        own = holders.index(group.rank)
        first, end = (index * of_head // len(holders) for index in (own, own + 1))
        if first < end:
            piece = Piece(place * most * unit, (head * of_head + first) * unit, (end - first) * unit)
            last = pieces[-1] if pieces else None
            # Pieces that lie one behind the other on both sides are one.
            if last and (last.at + last.count, last.first + last.count) == (piece.at, piece.first):
                pieces[-1] = replace(last, count=last.count + piece.count)
            else:
                pieces.append(piece)
    return Part(dim, config.num_heads * unit, len(heads) * most * unit, tuple(pieces))
