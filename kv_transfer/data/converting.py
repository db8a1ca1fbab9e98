"""Converts blocks of a peer's layout into blocks of ours: tokens regrouped, heads picked, values rounded.

The one module of ``kv_transfer`` that needs torch, which is imported only when a peer's layout differs. Values are moved or
rounded to nearest even, never combined, and float32 holds every bfloat16 exactly: a converted block is what its sender
computed, in our dtype.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from contract.layout import KVLayout
from kv_transfer.counters import Counters
from kv_transfer.protocol.digests import Share
from kv_transfer.protocol.orders import Conversion, PullJob
from kv_transfer.transports.block_views import clear, settle

if TYPE_CHECKING:
    from torch import Tensor

_IN_USE = "transfer_staging_bytes"
_HEADS = 2
"""Axes of one block."""
_TOKENS = 3

ReadShare = Callable[[PullJob, Share, int, Sequence[memoryview]], object]
"""(job, rank's share, first block, views): reads the sender's blocks into the views and verifies them."""


class Converter:
    """Converts pulls in staging memory: one buffer a pull, of at most ``max_bytes``, or what one block of ours needs.

    Thread-safe. read: see ``ReadShare``.
    """

    def __init__(self, counters: Counters, max_bytes: int, read: ReadShare) -> None:
        self._counters = counters
        self._max_bytes = max_bytes
        self._read = read
        counters.add(_IN_USE, 0)
        counters.add("transfer_converted_blocks_total", 0)

    def convert(self, job: PullJob, conversion: Conversion, views: Sequence[memoryview]) -> None:
        """Read and verify the sender's blocks in staging memory, piece by piece, and write ours into ``views``."""
        plan = conversion.plan
        size = plan.theirs.layout.block_bytes
        with self.buffer(conversion) as buffer:
            for first, end in self._pieces(conversion):
                blocks = plan.source_blocks(first, end, conversion.num_tokens)
                num_bytes = len(blocks) * size
                sources: dict[int, memoryview] = {}
                for number, share in enumerate(job.shares):
                    content = buffer[number * num_bytes : (number + 1) * num_bytes]
                    staged = [content[start : start + size] for start in range(0, num_bytes, size)]
                    self._read(job, share, blocks.start, staged)
                    sources[share.rank] = content
                targets = views[first - conversion.first_block : end - conversion.first_block]
                clear(targets)
                convert_blocks(conversion, sources, first, targets)
                settle(targets)
        self._counters.add("transfer_converted_blocks_total", len(views))

    @contextmanager
    def buffer(self, conversion: Conversion) -> Iterator[memoryview]:
        """Lend memory for the sources of the largest piece, of every rank that is read."""
        sources = (
            conversion.plan.source_blocks(*piece, conversion.num_tokens) for piece in self._pieces(conversion)
        )
        num_bytes = max(map(len, sources)) * conversion.source_bytes
        self._counters.add(_IN_USE, num_bytes)
        try:
            # Anonymous: its pages are allocated only as they are filled.
            yield memoryview(mmap.mmap(-1, num_bytes))
        finally:
            self._counters.add(_IN_USE, -num_bytes)

    def _pieces(self, conversion: Conversion) -> list[tuple[int, int]]:
        """Cut a conversion into (first, end) of our blocks whose sources fit into a buffer."""
        most = self._max_bytes // conversion.source_bytes
        return list(conversion.plan.pieces(conversion.first_block, conversion.end_block, most))


def convert_blocks(
    conversion: Conversion, sources: Mapping[int, memoryview], our_first: int, targets: Sequence[memoryview]
) -> None:
    """Fill ``targets``, our blocks from ``our_first`` on, with their tokens' KV.

    sources: their rank → the bytes of the blocks that these are made from, for each rank that is read. Slots behind the
    prompt's end are left unchanged.
    """
    plan = conversion.plan
    our_end = our_first + len(targets)
    their_first = plan.source_blocks(our_first, our_end, conversion.num_tokens).start
    their_blocks = {rank: _as_blocks(content, plan.theirs.layout) for rank, content in sources.items()}
    our_blocks = [_as_blocks(target, plan.ours.layout)[0] for target in targets]
    heads = list(plan.head_runs(conversion.our_rank))
    for run in plan.token_runs(our_first, our_end, conversion.num_tokens):
        target = _part(our_blocks[run.ours - our_first], _TOKENS, run.our_offset, run.count)
        for part in heads:
            block = their_blocks[part.theirs][run.theirs - their_first]
            source = _part(block, _TOKENS, run.their_offset, run.count)
            _part(target, _HEADS, part.our_offset, part.count).copy_(
                _part(source, _HEADS, part.their_offset, part.count)
            )


def _as_blocks(content: memoryview, layout: KVLayout) -> "Tensor":
    """Return ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``, sharing the bytes."""
    import torch

    from engine.kv_cache.memory import TORCH_DTYPES

    shape = (-1, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    return torch.frombuffer(content, dtype=TORCH_DTYPES[layout.dtype]).view(shape)


def _part(block: "Tensor", axis: int, first: int, count: int) -> "Tensor":
    return block if block.shape[axis] == count else block.narrow(axis, first, count)
