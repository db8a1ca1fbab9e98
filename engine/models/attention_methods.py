"""Layers that compute attention in a method ``_attn`` of their own, not by transformers' interface: GPT-J and its kin.

The method gets query, key and value ``[1, heads, num_tokens, head_dim]`` and transformers' mask, so the engine's attention
can replace it.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

_METHOD = "_attn"
_CHOSEN = "_attn_implementation"
# The names that a layer has for the number by which it divides scores.
_DIVISORS = ("scale_attn", "norm_factor")


class _Method:
    """A replacement for ``_attn`` of one layer, which asks ``attend`` under the names of the engine's attentions."""

    def __init__(
        self, module: Any, config: Any, attend: Callable[..., tuple[Tensor, None]], names: tuple[str, ...]
    ) -> None:
        self._module = module
        self._own = getattr(module, _METHOD)
        self._config = config
        self._attend = attend
        self._names = names
        self._scale = 1.0 / float(next(getattr(module, name) for name in _DIVISORS if hasattr(module, name)))

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mixed values ``[1, heads, num_tokens, head_dim]``, and None or the weights."""
        if getattr(self._config, _CHOSEN) not in self._names:
            mixed, weights = self._own(query, key, value, attention_mask)
            return mixed, weights
        # CodeGen rotates in float32, in all dtypes.
        query, key = (each.to(value.dtype) for each in (query, key))
        mixed, _ = self._attend(self._module, query, key, value, attention_mask, scaling=self._scale)
        return mixed.transpose(1, 2), None


def replace_methods(whole: Any, attend: Callable[..., tuple[Tensor, None]], names: tuple[str, ...]) -> None:
    """Replace the method of each layer that has one. names: under which it calls ``attend``."""
    module: Any
    for module in whole.modules():
        own = getattr(module, _METHOD, None)
        is_layer = hasattr(module, "layer_idx") and any(hasattr(module, name) for name in _DIVISORS)
        if callable(own) and is_layer and not isinstance(own, _Method):
            setattr(module, _METHOD, _Method(module, whole.config, attend, names))


def choose_attention(whole: nn.Module, name: str) -> None:
    """Make all layers use the attention of a name. transformers sets none of a model that has such methods."""
    chosen: Any = whole
    if any(isinstance(getattr(module, _METHOD, None), _Method) for module in whole.modules()):
        setattr(chosen.config, _CHOSEN, name)
    else:
        chosen.set_attn_implementation(name)
