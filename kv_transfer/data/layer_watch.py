"""Watches of forward passes: orders that are published layer by layer, and estimates of a pass's end."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

from engine.connector import KVMemory, LayerWatch
from kv_transfer.protocol.orders import PublishOrder
from kv_transfer.transports.block_views import is_flat

_SHARES = (0.125, 0.5, 0.75, 0.875, 0.95)
"""The estimate of a pass's end is updated once these shares of its layers are stored."""
_NUM_TAILS = 5


class PassJobs(Protocol):
    """Jobs that a watch posts to the data thread; they run in the order of the calls."""

    def post_layers(self, order: PublishOrder, num_bytes: int) -> None:
        """Make the first ``num_bytes`` of each block of an order readable."""

    def post_order(self, order: PublishOrder) -> None:
        """Publish the blocks of an order."""

    def post_end(self, orders: Sequence[PublishOrder], end: float) -> None:
        """Send the receivers of these orders an estimate of the pass's end, on the monotonic clock."""


class SplitOrders:
    """A ``LayerWatch``: makes blocks readable group by group of layers, and publishes them before a token is sampled.

    The token travels through processes that compete with the publishing thread for processors.
    """

    def __init__(self, orders: Sequence[PublishOrder], memory: KVMemory, jobs: PassJobs) -> None:
        self._orders = orders
        self._memory = memory
        self._jobs = jobs
        self._are_published = False
        self._due: dict[int, list[PublishOrder]] = defaultdict(list)
        for order in orders:
            for num_layers in split_points(memory.layout.num_layers, order.num_parts):
                self._due[num_layers].append(order)

    def stored(self, num_layers: int) -> None:
        """See LayerWatch."""
        if num_layers in self._due:
            self._memory.mark_computed()
            layout = self._memory.layout
            for order in self._due[num_layers]:
                self._jobs.post_layers(order, layout.block_bytes // layout.num_layers * num_layers)

    def computed(self) -> None:
        """See LayerWatch."""
        self._are_published = True
        self._memory.mark_computed()
        for order in self._orders:
            self._jobs.post_order(order)

    def has_published(self, order: PublishOrder) -> bool:
        """Return whether the order has been posted."""
        return self._are_published and any(order is each for each in self._orders)


def split_points(num_layers: int, num_parts: int) -> frozenset[int]:
    """Return after how many layers each of ``num_parts`` groups ends; none for a single group."""
    ends = (num_layers * part // num_parts for part in range(1, num_parts + 1))
    return frozenset(end for end in ends if end) if num_parts > 1 else frozenset()


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


class PassListeners:
    """A ``LayerWatch`` that forwards to the watches of the current pass. Used from the step thread."""

    def __init__(self, memory: KVMemory, jobs: PassJobs) -> None:
        self._memory = memory
        self._jobs = jobs
        # On a device a layer is reported when it is launched, from which no end can be estimated.
        self._estimator = CompletionEstimator(memory.layout.num_layers) if is_flat(memory) else None
        self._split: SplitOrders | None = None
        self._listeners: list[LayerWatch] = []

    def begin(self, orders: Sequence[PublishOrder]) -> LayerWatch | None:
        """Start a pass that computes the blocks of these orders. Returns None if nothing watches it."""
        self._split = None
        self._listeners = []
        if split := [order for order in orders if order.num_parts > 1]:
            self._split = SplitOrders(split, self._memory, self._jobs)
            self._listeners.append(self._split)
        last = [order for order in orders if order.tells_end]
        if last and self._estimator is not None:
            num_blocks = sum(len(order.block_ids) for order in orders)
            self._estimator.begin(num_blocks, lambda end: self._jobs.post_end(last, end))
            self._listeners.append(self._estimator)
        return self if self._listeners else None

    def stored(self, num_layers: int) -> None:
        """See LayerWatch."""
        for listener in self._listeners:
            listener.stored(num_layers)

    def computed(self) -> None:
        """See LayerWatch."""
        for listener in self._listeners:
            listener.computed()

    def has_published(self, order: PublishOrder) -> bool:
        """Return whether the order was posted before its step was over."""
        return self._split is not None and self._split.has_published(order)
