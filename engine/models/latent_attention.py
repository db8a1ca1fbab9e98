"""Multi-head latent attention (DeepSeek-V2, 2024) over one cached row of each token, in place of its keys and values.

Such a layer computes the keys and values of all heads from one latent: ``kv_b_proj`` multiplies it by W_uk and W_uv. The
latent behind its norm and the rotated part of the key, which all heads share, are the row. As products associate, a query is
multiplied by W_uk in place of each cached latent (q · (W_uk c) = (qᵀ W_uk) · c), and the mean of latents by W_uv in place of
each value. So all heads attend over the rows as over one KV head whose value is its key.

Both ways round differently: in float32 the tokens are those of transformers, in 16 bits the self-check's tolerance holds.
"""

from typing import Any

import torch
from torch import Tensor, nn

from contract.errors import InternalError

_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class LatentProjection(nn.Module):
    """The ``kv_b_proj`` of a layer that attends over latents. Owns the step's latents between its call and the attention.

    row_size: numbers of a token's row. Its own result is read by no one: it is zeros, which cost no memory.
    """

    def __init__(self, weight: nn.Parameter, nope_dim: int, rope_dim: int, value_dim: int) -> None:
        super().__init__()
        self.weight = weight
        self.rank = weight.shape[1]
        self.row_size = self.rank + rope_dim
        self._nope_dim = nope_dim
        self._value_dim = value_dim
        self._latents: Tensor | None = None

    def forward(self, latents: Tensor) -> Tensor:
        """Keep the tokens' latents ``[1, ..., num_tokens, rank]`` until ``rows``."""
        self._latents = latents.reshape(-1, self.rank)
        return latents.new_zeros(1).expand(*latents.shape[:-1], len(self.weight))

    def rows(self, key: Tensor) -> Tensor:
        """Return the tokens' rows ``[num_tokens, 1, row_size]``. key: ``[num_tokens, num_heads, nope + rope]``."""
        latents = self._latents
        if latents is None:
            raise InternalError("a layer attends over latents that it has not computed")
        self._latents = None
        return torch.cat((latents, key[:, 0, self._nope_dim :]), dim=-1)[:, None]

    def absorb(self, query: Tensor) -> Tensor:
        """Return queries over rows ``[num_tokens, num_heads, row_size]`` of those over keys."""
        to_key, _ = self._of_heads()
        nope = query[..., : self._nope_dim].transpose(0, 1)
        return torch.cat(((nope @ to_key).transpose(0, 1), query[..., self._nope_dim :]), dim=-1)

    def expand(self, mixed: Tensor) -> Tensor:
        """Return the attention's output ``[num_tokens, num_heads, value]`` of means of rows, ``[..., row_size]``."""
        _, to_value = self._of_heads()
        latents = mixed[..., : self.rank].transpose(0, 1)
        return (latents @ to_value.transpose(1, 2)).transpose(0, 1)

    def _of_heads(self) -> tuple[Tensor, Tensor]:
        """Return W_uk ``[num_heads, nope, rank]`` and W_uv ``[num_heads, value, rank]``, views of the weight."""
        of_heads = self.weight.view(-1, self._nope_dim + self._value_dim, self.rank)
        return of_heads[:, : self._nope_dim], of_heads[:, self._nope_dim :]


def find_latent(attention: Any) -> LatentProjection | None:
    """Return the projection by which a layer attends over latents; None if its keys and values come from no latent."""
    projection: Any = getattr(attention, "kv_b_proj", None)
    if isinstance(projection, LatentProjection):
        return projection
    is_linear = isinstance(projection, nn.Linear)
    if not is_linear or not hasattr(attention, "kv_a_layernorm") or projection.bias is not None:
        return None
    nope, rope, value = (getattr(attention, name, None) for name in _SIZES)
    if not nope or not rope or not value or projection.out_features % (nope + value):
        return None
    return LatentProjection(projection.weight, nope, rope, value)
