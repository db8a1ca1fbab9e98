"""A mixture of experts (Shazeer et al. 2017): a router sends each token to a few of many gated MLPs.

This is the reference for every other implementation. The router computes in float32; ties go to the lower expert. Each
token's results are added in ascending order of its experts, as transformers does, and so does not depend on its batch.

The experts may be spread over the ranks of a data-parallel group (``spread``): each rank has a range of them and its own
tokens. In each such layer the ranks gather all tokens, each computes those of its own experts, and the results of a token
are added up at its rank. So all ranks enter each of these layers together (``data_parallel``). Within a rank of several
processes, each has a part of every expert's width, like that of any MLP (``engine.models.sharding``).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.distributed.group import RankGroup
from engine.models.config import DecoderConfig, Experts
from engine.models.linear import DenseLinear, LinearOp


class TokenExchange(Protocol):
    """The tokens of a group of data-parallel ranks, within one layer. All ranks make the same calls in the same order.

    Each rank has its own number of rows, which may be any from 1 on.
    """

    @property
    def rank(self) -> int:
        """The index of this rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return, of each of ``parts`` (``[num_rows, ...]``), the rows of all ranks, rank by rank."""

    def add_up_own(self, states: Tensor) -> Tensor:
        """Return the sum over all ranks of the rows of this one; ``states`` are rows as ``gather`` returned them last."""

    def close(self) -> None:
        """Leave the group."""


class Expert(nn.Module):
    """down(silu(gate(x)) * up(x)), of this rank's width: the ranks' results are not added up yet."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj: LinearOp = DenseLinear(hidden_size, width, bias=False)
        self.up_proj: LinearOp = DenseLinear(hidden_size, width, bias=False)
        self.down_proj: LinearOp = DenseLinear(width, hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))


class SparseMLP(nn.Module):
    """The layer that stands in the place of an MLP: router and experts."""

    def __init__(self, config: DecoderConfig, experts: Experts, group: RankGroup) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, experts.num, bias=False)
        self.experts = nn.ModuleDict(
            {str(index): Expert(config.hidden_size, experts.width) for index in range(experts.num)}
        )
        self._shape = experts
        self._group = group
        self._exchange: TokenExchange | None = None

    def forward(self, states: Tensor) -> Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape."""
        logits = F.linear(states, self.gate.weight)
        shares, chosen = F.softmax(logits, dim=-1, dtype=torch.float32).topk(self._shape.num_active, dim=-1)
        if self._shape.normalises:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        weights = shares.to(logits.dtype)
        if self._exchange is None:
            return self._group.add_up(self._mix(states, chosen, weights))
        # Those of one rank make the exchange with the same processes of other ranks, each with its own part of the width.
        mixed = self._mix(*self._exchange.gather((states, chosen, weights)))
        return self._group.add_up(self._exchange.add_up_own(mixed))

    def spread(self, exchange: TokenExchange) -> None:
        """Keep the experts of this rank only, and exchange tokens from now on."""
        own = experts_of(self._shape.num, exchange.size, exchange.rank)
        for index in range(self._shape.num):
            if index not in own:
                del self.experts[str(index)]
        self._exchange = exchange

    def _mix(self, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the results of the experts that are here."""
        mixed = torch.zeros_like(states)
        for index in sorted({int(name) for name in self.experts} & set(chosen.flatten().tolist())):
            rows, places = torch.where(chosen == index)
            result = self.experts[str(index)](states[rows]) * weights[rows, places, None]
            mixed.index_add_(0, rows, result.to(mixed.dtype))
        return mixed


def experts_of(num_experts: int, num_ranks: int, rank: int) -> range:
    """Return the experts that a rank has; the ranks' numbers of them differ by at most one."""
    first, end = (index * num_experts // num_ranks for index in (rank, rank + 1))
    return range(first, end)
