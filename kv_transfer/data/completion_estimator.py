"""Estimates when a forward pass will be over, from earlier passes and from the layers that are already computed."""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

_SHARES = (0.125, 0.5, 0.75, 0.875, 0.95)
"""The estimate is updated once these shares of the layers are stored."""
_NUM_TAILS = 5


class CompletionEstimator:
    """A ``LayerWatch`` that estimates the end of a pass. Used for one pass after another.

    At first a pass is assumed to take as long as the last one of its size; later its remaining layers to take as long as
    those before, and what follows the last layer's KV as long as it usually did.
    """

    def __init__(self, num_layers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_layers = num_layers
        self._clock = clock
        self._points = frozenset(max(2, round(share * num_layers)) for share in _SHARES)
        self._tails = deque[float](maxlen=_NUM_TAILS)
        self._seconds_per_block: dict[int, float] = {}
        self._report: Callable[[float], None] = lambda _end: None
        self._num_blocks = 1
        self._begin = 0.0
        self._first = (0, 0.0)
        """The first number of layers that was stored in this pass, and when."""
        self._last = (0, 0.0)

    def begin(self, num_blocks: int, report: Callable[[float], None]) -> None:
        """Start a pass that computes ``num_blocks``. report: called with each new estimate of its end, by the clock."""
        self._num_blocks = num_blocks
        self._report = report
        self._begin = self._clock()
        self._first = self._last = (0, 0.0)
        known = self._seconds_per_block.get(self._size)
        if known is not None:
            report(self._begin + known * num_blocks)

    def stored(self, num_layers: int) -> None:
        """See LayerWatch."""
        self._last = (num_layers, self._clock())
        (first, since) = self._first
        if first == 0:
            self._first = self._last
        elif num_layers in self._points:
            now = self._last[1]
            per_layer = (now - since) / (num_layers - first)
            tail = median(self._tails) if self._tails else 0.0
            self._report(now + (self._num_layers - num_layers) * per_layer + tail)

    def computed(self) -> None:
        """See LayerWatch."""
        now = self._clock()
        (num_layers, since) = self._last
        if num_layers == self._num_layers:
            self._tails.append(now - since)
            self._seconds_per_block[self._size] = (now - self._begin) / self._num_blocks

    @property
    def _size(self) -> int:
        """The class of passes that take about as long a block: they differ by less than a factor of two."""
        return self._num_blocks.bit_length()
