"""Turns blocks of a peer's layout into blocks of ours: tokens regrouped, heads picked, values rounded.

The one module here that needs torch. Rounding is torch's own, to nearest even; float32 holds every bfloat16 exactly. A
token's values are moved or rounded, never combined, so a converted block is what its sender computed, in our dtype.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from contract.layout import KVLayout
from engine.kv_cache.memory import TORCH_DTYPES
from kv_transfer.protocol.plan import TransferPlan

_HEADS = 2
_TOKENS = 3
"""Axes of one block."""


def convert_blocks(
    plan: TransferPlan,
    sources: Mapping[int, tuple[int, memoryview]],
    our_first: int,
    targets: Sequence[memoryview],
    num_tokens: int,
    our_rank: int = 0,
) -> None:
    """Fill ``targets``, our blocks from ``our_first`` on of a prompt of ``num_tokens``, with its tokens' KV.

    sources: their rank → (first block, the bytes of consecutive blocks), for each rank in ``plan.head_runs(our_rank)``.
    Places behind the prompt's end are left as they are.
    """
    their_blocks = {
        rank: (first, _as_blocks(content, plan.theirs.layout)) for rank, (first, content) in sources.items()
    }
    our_blocks = [_as_blocks(target, plan.ours.layout)[0] for target in targets]
    heads = plan.head_runs(our_rank)
    for run in plan.token_runs(our_first, our_first + len(targets), num_tokens):
        target = _part(our_blocks[run.our_block - our_first], _TOKENS, run.our_offset, run.num_tokens)
        for part in heads:
            first, blocks = their_blocks[part.their_rank]
            source = _part(blocks[run.their_block - first], _TOKENS, run.their_offset, run.num_tokens)
            _part(target, _HEADS, part.our_first, part.num_heads).copy_(
                _part(source, _HEADS, part.their_first, part.num_heads)
            )


def _as_blocks(content: memoryview, layout: KVLayout) -> Tensor:
    """``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``, sharing the bytes."""
    shape = (-1, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    return torch.frombuffer(content, dtype=TORCH_DTYPES[layout.dtype]).view(shape)


def _part(block: Tensor, axis: int, first: int, count: int) -> Tensor:
    return block if block.shape[axis] == count else block.narrow(axis, first, count)
