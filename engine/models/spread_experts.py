"""Experts of transformers' modules, spread over the ranks of a data-parallel group as those of ``engine.models.experts``.

Such a module has the weights of all experts of a layer as tensors ``[num_experts, ...]``, gets the experts that the router
has chosen, and skips the number behind its last one. So each rank keeps a range of the tensors, and gathers the tokens of
all ranks, with their experts: those of other ranks are skipped.
"""

from typing import Any

import torch
from torch import Tensor, nn

from engine.models.config import unserved
from engine.models.experts import TokenExchange, experts_of

# transformers' decorator of modules of experts sets it.
_MARK = "_is_expert_parallel"


def spread(whole: nn.Module, exchange: TokenExchange, architecture: str) -> None:
    """Keep this rank's experts of each layer, and exchange tokens from now on. Raises SettingError if no layer has any."""
    layers = [module for module in whole.modules() if hasattr(module, _MARK)]
    if not layers:
        raise unserved(architecture, "its experts cannot be spread over data-parallel ranks")
    for layer in layers:
        _spread_layer(layer, exchange, architecture)


def _spread_layer(layer: Any, exchange: TokenExchange, architecture: str) -> None:
    own = experts_of(layer.num_experts, exchange.size, exchange.rank)
    for name, weight in list(layer.named_parameters(recurse=False)):
        if len(weight) != layer.num_experts:
            raise unserved(
                architecture, f"its tensor {name!r} of experts cannot be spread over data-parallel ranks"
            )
        # A copy: a part would keep all of it in memory.
        setattr(layer, name, nn.Parameter(weight[own.start : own.stop].clone(), requires_grad=False))
    layer.num_experts = len(own)
    setattr(layer, _MARK, True)
    compute = layer.forward

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape. top_k_index, top_k_weights: ``[num_tokens, num_active]``."""
        states, chosen, weights = exchange.gather((hidden_states, top_k_index, top_k_weights))
        is_here = (chosen >= own.start) & (chosen < own.stop)
        mixed: Tensor = compute(states, torch.where(is_here, chosen - own.start, len(own)), weights)
        return exchange.add_up_own(mixed)

    layer.forward = forward
