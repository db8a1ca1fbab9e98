"""An area of a device that a peer's blocks land in: they are verified there and converted into the pool on the device.

A library reads from device to device into the area as it does into a pool of equal blocks, so no byte passes through the
host. An area belongs to one source, and is written to by at most one read at a time.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from engine.connector import LandsDirectly
from kv_transfer.protocol.orders import Conversion
from kv_transfer.transports.block_views import write_views

if TYPE_CHECKING:
    from torch import Tensor

_HEADS = 3
"""Axes of a pool ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``."""
_TOKENS = 4


class DeviceLanding:
    """Places for ``num_blocks`` of the sender's blocks, of every rank that is read. See ``Staging``."""

    def __init__(self, memory: LandsDirectly, conversion: Conversion, num_blocks: int) -> None:
        self._memory = memory
        layout = conversion.plan.theirs.layout
        self._areas = {
            rank: memory.landing_area(layout, num_blocks)
            for rank in conversion.plan.ranks_of(conversion.our_rank)
        }
        self.num_bytes = len(self._areas) * num_blocks * layout.block_bytes

    def views(self, rank: int, num_blocks: int) -> Sequence[memoryview]:
        """See Staging."""
        return write_views(self._areas[rank], range(num_blocks))

    def wait(self) -> None:
        """Wait for the copies from the host that were begun: the memory may be converted, or released."""
        for area in self._areas.values():
            area.commit([])

    def convert(self, conversion: Conversion, first: int, block_ids: Sequence[int]) -> None:
        """See Staging. Returns when the device has converted them: the next read may write to the area."""
        self.wait()
        self._memory.wait_until_unused()
        sources = {rank: area.pool for rank, area in self._areas.items()}
        work = partial(convert_in_pool, conversion, sources, first, self._memory.pool, block_ids)
        self._memory.launch(work).synchronize()


def convert_in_pool(
    conversion: Conversion,
    sources: Mapping[int, "Tensor"],
    our_first: int,
    pool: "Tensor",
    block_ids: Sequence[int],
) -> None:
    """Fill the pool's ``block_ids``, our blocks from ``our_first`` on, with their tokens' KV, in a few operations of torch.

    sources: their rank → blocks of which the first ones are those that ours are made from, for each rank that is read.
    Slots behind the prompt's end become zero.
    """
    import torch

    plan = conversion.plan
    size = plan.ours.layout.block_size
    our_end = our_first + len(block_ids)
    their_blocks = plan.source_blocks(our_first, our_end, conversion.num_tokens)
    # Only smaller blocks of ours can begin within one of theirs.
    num_skipped = our_first - their_blocks.start * plan.theirs.layout.block_size // size
    num_used = min(size, conversion.num_tokens - (our_end - 1) * size)
    targets = torch.tensor(block_ids, device=pool.device)
    for heads in plan.head_runs(conversion.our_rank):
        source = sources[heads.theirs][: len(their_blocks)].narrow(_HEADS, heads.their_offset, heads.count)
        content = _regrouped(source.to(pool.dtype), num_skipped, len(block_ids), size)
        pool.narrow(_HEADS, heads.our_offset, heads.count).index_copy_(0, targets, content)
    pool[block_ids[-1]].narrow(_TOKENS - 1, num_used, size - num_used).zero_()


def _regrouped(blocks: "Tensor", num_skipped: int, count: int, size: int) -> "Tensor":
    """Return ``count`` blocks of ``size`` tokens, behind ``num_skipped``, of the tokens in ``blocks``, which lie in a row.

    Blocks that are missing for the last one are zero.
    """
    num_blocks, *_, theirs, head_dim = blocks.shape
    planes = blocks.shape[1:_TOKENS]
    if size < theirs:
        parts = blocks.view(num_blocks, *planes, theirs // size, size, head_dim).movedim(_TOKENS, 1)
        return parts.flatten(0, 1)[num_skipped : num_skipped + count]
    ratio = size // theirs
    if num_blocks < count * ratio:
        present = blocks
        blocks = present.new_zeros((count * ratio, *planes, theirs, head_dim))
        blocks[:num_blocks] = present
    parts = blocks.view(count, ratio, *planes, theirs, head_dim).movedim(1, _TOKENS)
    return parts.flatten(_TOKENS, _TOKENS + 1)
