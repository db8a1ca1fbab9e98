"""Converts blocks of a peer's layout into blocks of ours: they are read into staging memory, verified there, and converted.

Of ``kv_transfer``, only what converts needs torch, which is imported when a peer's layout differs. Values are moved or
rounded to nearest even, never combined, and float32 holds every bfloat16 exactly: a converted block is what its sender
computed, in our dtype. On a device the staging memory is an area there: a library reads into it from device to device, as
into a pool of equal blocks, so no byte passes through the host.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from contract.layout import KVLayout
from engine.connector import KVMemory
from engine.device_pool import DevicePool
from kv_transfer.counters import Counters
from kv_transfer.protocol.digests import Share
from kv_transfer.protocol.orders import Conversion, PullJob
from kv_transfer.protocol.reads import Source
from kv_transfer.transports.block_views import write_views

if TYPE_CHECKING:
    from torch import Tensor

_IN_USE = "transfer_staging_bytes"
_HEADS = 2
"""Axes of one block."""
_TOKENS = 3

ReadShare = Callable[[PullJob, Share, int, Sequence[memoryview]], object]
"""(job, rank's share, first block, views): reads the sender's blocks into the views and verifies them."""
if TYPE_CHECKING:
    from torch import Tensor

_POOL_HEADS = 3
"""Axes of a pool ``[num_blocks, num_layers, parts, num_kv_heads, block_size, head_dim]``."""
_POOL_TOKENS = 4


class DeviceLanding:
    """Places for ``num_blocks`` of the sender's blocks, of every rank that is read. See ``Staging``."""

    def __init__(self, memory: DevicePool, conversion: Conversion, num_blocks: int) -> None:
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
        # Steps that were launched before may still read the blocks that are written now.
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
    Slots before the first token that is handed over, and behind the prompt's end, become zero.
    """
    import torch

    plan = conversion.plan
    size = plan.ours.layout.block_size
    our_end = our_first + len(block_ids)
    their_blocks = plan.source_blocks(our_first, our_end, conversion.num_tokens)
    # Only smaller blocks of ours can begin within one of theirs.
    num_skipped = max(0, our_first - their_blocks.start * plan.theirs.layout.block_size // size)
    num_missing = plan.num_missing(our_first) // plan.theirs.layout.block_size
    num_used = min(size, conversion.num_tokens - (our_end - 1) * size)
    targets = torch.tensor(block_ids, device=pool.device)
    for heads in plan.head_runs(conversion.our_rank):
        source = sources[heads.theirs][: len(their_blocks)].narrow(
            _POOL_HEADS, heads.their_offset, heads.count
        )
        content = _regrouped(source.to(pool.dtype), num_skipped, num_missing, len(block_ids), size)
        pool.narrow(_POOL_HEADS, heads.our_offset, heads.count).index_copy_(0, targets, content)
    pool[block_ids[-1]].narrow(_POOL_TOKENS - 1, num_used, size - num_used).zero_()


def _regrouped(blocks: "Tensor", num_skipped: int, num_missing: int, count: int, size: int) -> "Tensor":
    """Return ``count`` blocks of ``size`` tokens, behind ``num_skipped``, of the tokens in ``blocks``, which lie in a row.

    The first ``num_missing`` blocks of the first one, and those that are missing for the last one, are zero.
    """
    num_blocks, *_, theirs, head_dim = blocks.shape
    planes = blocks.shape[1:_POOL_TOKENS]
    if size < theirs:
        parts = blocks.view(num_blocks, *planes, theirs // size, size, head_dim).movedim(_POOL_TOKENS, 1)
        return parts.flatten(0, 1)[num_skipped : num_skipped + count]
    ratio = size // theirs
    if num_blocks < count * ratio:
        present = blocks
        blocks = present.new_zeros((count * ratio, *planes, theirs, head_dim))
        blocks[num_missing : num_missing + num_blocks] = present
    parts = blocks.view(count, ratio, *planes, theirs, head_dim).movedim(1, _POOL_TOKENS)
    return parts.flatten(_POOL_TOKENS, _POOL_TOKENS + 1)


class Staging(Protocol):
    """Memory that a peer's blocks are read into."""

    def views(self, rank: int, num_blocks: int) -> Sequence[memoryview]:
        """Return memory for so many blocks of one of the sender's ranks, until the next ``convert``."""

    def convert(self, conversion: Conversion, first: int, block_ids: Sequence[int]) -> None:
        """Write our blocks from ``first`` on, made of what is in the views, and wait for it."""


class Converter:
    """Converts pulls in staging memory of at most ``max_bytes`` for a peer, or what one block of ours needs.

    On a pool in host memory that is a buffer for each pull. On a device it is an area of the device for each link, which
    is kept until ``forget``. Thread-safe; one thread at a time converts what comes from one source. read: see ``ReadShare``.
    """

    def __init__(self, counters: Counters, max_bytes: int, read: ReadShare) -> None:
        self._counters = counters
        self._max_bytes = max_bytes
        self._read = read
        self._areas: dict[tuple[Source, int], DeviceLanding] = {}
        counters.add(_IN_USE, 0)
        counters.add("transfer_converted_blocks_total", 0)

    def start(self, memory: KVMemory) -> None:
        """Convert into this pool, and its further regions; called once, before anything is converted."""
        self._regions = memory.regions

    def convert(self, job: PullJob, conversion: Conversion) -> None:
        """Read and verify the sender's blocks in staging memory, piece by piece, and write ours."""
        with self.staging(job.source, conversion, job.group) as staging:
            for first, end in self._pieces(conversion):
                blocks = conversion.plan.source_blocks(first, end, conversion.num_tokens)
                number = blocks.start + conversion.offset
                for share in job.shares:
                    self._read(job, share, number, staging.views(share.rank, len(blocks)))
                ours = slice(first - conversion.first_block, end - conversion.first_block)
                staging.convert(conversion, first, job.block_ids[ours])
        self._counters.add("transfer_converted_blocks_total", len(job.block_ids))

    @contextmanager
    def staging(self, source: Source, conversion: Conversion, group: int = 0) -> Iterator[Staging]:
        """Lend memory for the sources of the largest piece, of every rank that is read."""
        memory = self._regions[group]
        if (on_device := memory.device_pool) is not None:
            area = self._areas.get((source, group))
            if area is None:  # the first use: an area for as many blocks as any pull may have at once
                plan = conversion.plan
                per_block = -(-plan.ours.layout.block_size // plan.theirs.layout.block_size)
                most = max(per_block, self._max_bytes // conversion.source_bytes)
                area = self._areas[source, group] = DeviceLanding(on_device, conversion, most)
                self._counters.add(_IN_USE, area.num_bytes)
            yield area
            return
        num_tokens = conversion.num_tokens
        pieces = [conversion.plan.source_blocks(*piece, num_tokens) for piece in self._pieces(conversion)]
        staging = HostStaging(memory, conversion, max(map(len, pieces)))
        self._counters.add(_IN_USE, staging.num_bytes)
        try:
            yield staging
        finally:
            self._counters.add(_IN_USE, -staging.num_bytes)

    def forget(self, source: Source) -> None:
        """Release the areas of a link that is gone; one that is read into lives until that read is terminal."""
        # A copy: the threads of other sources add areas meanwhile.
        for each in [each for each in list(self._areas) if each[0].token == source.token]:
            if (area := self._areas.pop(each, None)) is not None:
                area.wait()
                self._counters.add(_IN_USE, -area.num_bytes)

    def _pieces(self, conversion: Conversion) -> list[tuple[int, int]]:
        """Cut a conversion into (first, end) of our blocks whose sources fit into staging memory."""
        most = self._max_bytes // conversion.source_bytes
        return list(conversion.plan.pieces(conversion.first_block, conversion.end_block, most))


class HostStaging:
    """A buffer in host memory for ``num_blocks`` of the sender's blocks, of every rank that is read. See ``Staging``."""

    def __init__(self, memory: KVMemory, conversion: Conversion, num_blocks: int) -> None:
        self.num_bytes = num_blocks * conversion.source_bytes
        self._memory = memory
        self._block_bytes = conversion.plan.theirs.layout.block_bytes
        # Anonymous: its pages are allocated only as they are filled.
        self._buffer = memoryview(mmap.mmap(-1, self.num_bytes))
        self._contents: dict[int, memoryview] = {}

    def views(self, rank: int, num_blocks: int) -> Sequence[memoryview]:
        """See Staging."""
        num_bytes = num_blocks * self._block_bytes
        start = len(self._contents) * num_bytes
        content = self._contents[rank] = self._buffer[start : start + num_bytes]
        return [content[at : at + self._block_bytes] for at in range(0, num_bytes, self._block_bytes)]

    def convert(self, conversion: Conversion, first: int, block_ids: Sequence[int]) -> None:
        """See Staging."""
        convert_blocks(conversion, self._contents, first, write_views(self._memory, block_ids))
        self._contents.clear()


def convert_blocks(
    conversion: Conversion, sources: Mapping[int, memoryview], our_first: int, targets: Sequence[memoryview]
) -> None:
    """Fill ``targets``, our blocks from ``our_first`` on, with their tokens' KV.

    sources: their rank → the bytes of the blocks that these are made from, for each rank that is read. Slots behind the
    prompt's end are left unchanged; those before the first token that is handed over become zero.
    """
    plan = conversion.plan
    our_end = our_first + len(targets)
    their_first = plan.source_blocks(our_first, our_end, conversion.num_tokens).start
    their_blocks = {rank: _as_blocks(content, plan.theirs.layout) for rank, content in sources.items()}
    our_blocks = [_as_blocks(target, plan.ours.layout)[0] for target in targets]
    heads = list(plan.head_runs(conversion.our_rank))
    if num_missing := plan.num_missing(our_first):
        our_blocks[0].narrow(_TOKENS, 0, num_missing).zero_()  # what was there may be no number
    for run in plan.token_runs(our_first, our_end, conversion.num_tokens):
        target = _part(our_blocks[run.ours - our_first], _TOKENS, run.our_offset, run.count)
        for part in heads:
            block = their_blocks[part.theirs][run.theirs - their_first]
            source = _part(block, _TOKENS, run.their_offset, run.count)
            _part(target, _HEADS, part.our_offset, part.count).copy_(
                _part(source, _HEADS, part.their_offset, part.count)
            )


def _as_blocks(content: memoryview, layout: KVLayout) -> "Tensor":
    """Return ``[num_blocks, num_layers, parts, num_kv_heads, block_size, head_dim]``, sharing the bytes."""
    import torch

    from engine.kv_cache.memory import TORCH_DTYPES

    return torch.frombuffer(content, dtype=TORCH_DTYPES[layout.dtype]).view(-1, *layout.shape)


def _part(block: "Tensor", axis: int, first: int, count: int) -> "Tensor":
    return block if block.shape[axis] == count else block.narrow(axis, first, count)
