"""The small layers of a decoder; names of the parameters are those of the checkpoints."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.distributed.group import RankGroup
from engine.models.sharding import row_parallel


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019) over the last dimension, in float32, then cast and weighted."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """Map ``[..., size]`` to the same shape and dtype."""
        wide = states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(states.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020); ``intermediate_size`` is this rank's."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, group: RankGroup) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = row_parallel(intermediate_size, hidden_size, bias, group)

    def forward(self, states: Tensor) -> Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape."""
        down: Tensor = self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))
        return down
