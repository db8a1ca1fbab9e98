"""Memory for a peer's blocks that cannot be read straight into the pool: bounded per pull, counted, given back."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

from kv_transfer.counters import Counters
from kv_transfer.protocol.orders import Conversion

DEFAULT_STAGING_BYTES = 16 * 2**20
_IN_USE = "transfer_staging_bytes"


class Staging:
    """Lends one buffer per pull, each of at most ``max_bytes``, or what one block of ours needs. Thread-safe."""

    def __init__(self, counters: Counters, max_bytes: int) -> None:
        self._counters = counters
        self._max_bytes = max_bytes
        counters.add(_IN_USE, 0)

    def pieces(self, conversion: Conversion) -> list[tuple[int, int]]:
        """Cut what is converted into (first, end) of our blocks whose sources fit into a buffer."""
        per_block = conversion.source_bytes
        return list(
            conversion.plan.pieces(conversion.first_block, conversion.end_block, self._max_bytes // per_block)
        )

    @contextmanager
    def buffer(self, conversion: Conversion) -> Iterator[memoryview]:
        """Room for the sources of the largest piece, of every rank that is read."""
        num_blocks = max(len(conversion.sources_of(*piece)) for piece in self.pieces(conversion))
        num_bytes = num_blocks * conversion.source_bytes
        self._counters.add(_IN_USE, num_bytes)
        try:
            yield memoryview(mmap.mmap(-1, num_bytes))  # its pages come as they are filled, not all at once
        finally:
            self._counters.add(_IN_USE, -num_bytes)
