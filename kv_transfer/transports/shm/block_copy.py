"""Copies the blocks of one pool into another.

Between flat pools a loop in C of ours (``kv_transfer.native``) copies many blocks, without Python's lock. Where that
cannot be compiled, and for other memory, Python copies block by block.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kv_transfer.native.compiling import CopyBlocks
from kv_transfer.protocol.reads import Read, blocks_per_piece
from kv_transfer.transports.block_views import BlockViews

_LARGE_BYTES = 2**18
_ID_BYTES = 8
Copy = Callable[[int, int], None]
"""Copies the blocks from a first one to before a last one."""


class PieceCopier:
    """Chooses how the pieces of a read are copied.

    copy_blocks: the loop in C, if any. cache_bytes: the size of the processor's last cache.
    """

    def __init__(self, copy_blocks: CopyBlocks | None, cache_bytes: int) -> None:
        self._copy_blocks = copy_blocks
        self._cache_bytes = cache_bytes

    def copying(self, blocks: BlockViews, views: Sequence[memoryview], read: Read) -> Copy:
        """Return a copy of ``blocks`` to ``views``. It raises ReadStoppedError after ``read.stop()``."""
        if self._copy_blocks is None or not isinstance(views, BlockViews):
            return copy_each(blocks, views, read)
        past_caches = self._exceeds_caches(blocks.view_bytes, len(blocks), read)
        copy_all = copy_natively(self._copy_blocks, blocks, views, past_caches=past_caches)

        def copy_piece(start: int, end: int) -> None:
            read.check()
            copy_all(start, end)

        return copy_piece

    def _exceeds_caches(self, view_bytes: int, num_views: int, read: Read) -> bool:
        """Return True if the caches cannot hold source and target until the bytes are read again."""
        num_at_once = min(num_views, blocks_per_piece(view_bytes)) if read.is_followed else num_views
        return 2 * num_at_once * view_bytes > self._cache_bytes


def copy_natively(
    copy_blocks: CopyBlocks, source: BlockViews, target: BlockViews, *, past_caches: bool
) -> Copy:
    """Return a copy of ``source`` to ``target``, whose blocks and views have the same sizes.

    past_caches: write past the processor's caches: the bytes are not read again soon, or do not fit. The copy neither
    keeps a pool alive nor exports its memory.
    """
    step = source.block_bytes
    size = source.view_bytes
    out_of = source.first_address
    into = target.first_address
    ids = np.ascontiguousarray(source.ids), np.ascontiguousarray(target.ids)
    out_of_ids, into_ids = (each.__array_interface__["data"][0] for each in ids)

    def copy(start: int, end: int, _kept: object = ids) -> None:
        at = start * _ID_BYTES
        copy_blocks(into, into_ids + at, out_of, out_of_ids + at, end - start, step, size, past_caches)

    return copy


def copy_each(blocks: BlockViews, views: Sequence[memoryview], read: Read) -> Copy:
    """Return a copy of ``blocks`` to ``views``, block by block; large ones without Python's lock."""
    is_large = blocks.view_bytes >= _LARGE_BYTES

    def copy(start: int, end: int) -> None:
        for number in range(start, end):
            read.check()
            # No name keeps a view of the pool in an error's frames.
            if is_large:
                np.copyto(np.frombuffer(views[number], np.uint8), np.frombuffer(blocks[number], np.uint8))
            else:
                views[number][:] = blocks[number]

    return copy
