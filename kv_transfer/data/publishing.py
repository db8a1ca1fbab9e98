"""The publishing side of the data half: digests what is lent, makes it readable, and estimates when it will be whole."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median

from contract.errors import ErrorKind
from contract.layout import STATES
from engine.connector import Computed, KVMemory, LayerWatch, mark_computed, states_of
from kv_transfer.data.reading import DigestViews
from kv_transfer.data.threads import DataReports
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.digests import FOLD64, XXH3_64, RunningDigests, digests_of, running_digests
from kv_transfer.protocol.orders import PublishOrder
from kv_transfer.protocol.reads import MAX_PIECE_BLOCKS, BlockPart, blocks_per_piece
from kv_transfer.transports.block_views import read_views
from kv_transfer.transports.transport import Senders

logger = logging.getLogger(__name__)
_SHARES = (0.125, 0.5, 0.75, 0.875, 0.95)
"""The estimate is updated once these shares of the layers are stored."""
_NUM_TAILS = 5


@dataclass
class _Unfinished:
    """Lent blocks of which the first ``num_bytes`` bytes are digested.

    is_stored: they are readable as a whole. error: why they will fail when they are published.
    """

    digests: RunningDigests
    num_bytes: int = 0
    is_stored: bool = False
    error: Exception | None = None


class Publisher:
    """Owns the digests of blocks that are being computed. Used from the data thread."""

    def __init__(
        self, memory: KVMemory, views: Sequence[DigestViews], senders: Senders, reports: DataReports
    ) -> None:
        on_device = [region.device_pool for region in memory.regions]
        self.digest = FOLD64 if all(each is not None and each.can_fold for each in on_device) else XXH3_64
        self._is_on_device = self.digest == FOLD64
        self._regions = memory.regions
        self._views = views
        self._senders = senders
        self._reports = reports
        self._unfinished: dict[str, _Unfinished] = {}

    def publish_layers(self, order: PublishOrder, num_bytes: int, computed: Computed) -> None:
        """Make the first ``num_bytes`` of each block of an order readable, once they are computed.

        On a device blocks are digested when all is stored: that takes microseconds, and each launch stops a pass for longer.
        """
        is_new = order.key not in self._unfinished
        if is_new:
            self._unfinished[order.key] = _Unfinished(running_digests(self.digest, order.seeds))
        unfinished = self._unfinished[order.key]
        try:
            computed.synchronize()
            if not self._is_on_device:
                self._digest(unfinished, order, num_bytes)
                unfinished.num_bytes = num_bytes
            for start, end in self._ranges(order):
                # The lease grows with the first part only: further parts are of the same blocks.
                block_ids = order.block_ids[start:end]
                first = order.first_block + start
                grants = self._senders.publish(order.name, block_ids, first, order.group) if is_new else ()
                ready = ev.LayerRange(first, end - start, num_bytes, grants)
                self._reports.send_event(order.key, ready)
            unfinished.is_stored = num_bytes == self._regions[order.group].layout.block_bytes
        except Exception as error:  # noqa: BLE001 - the boundary of a job: the range fails once it is published
            unfinished.error = error

    def report_end(self, orders: Sequence[PublishOrder], end: float) -> None:
        """Send the receivers of these orders an estimate of the pass's end, on the monotonic clock."""
        seconds = max(0.0, end - time.monotonic())
        for order in orders:
            self._reports.end_expected(order.key, seconds)

    def publish(self, order: PublishOrder, computed: Computed) -> None:
        """Publish an order range by range: the receiver copies and verifies one while the next is being digested.

        computed: is waited for first, unless all layers are stored; what was launched after it is not.
        """
        unfinished = self._unfinished.pop(order.key, None)
        is_stored = unfinished is not None and unfinished.is_stored
        for start, end in self._ranges(order):
            outcome: ev.SendEvent
            try:
                if not is_stored:
                    computed.synchronize()
                outcome = self._publish_range(order, start, end, unfinished)
            except Exception as error:  # the boundary of a job: its transfer fails, the others go on
                logger.exception("publishing blocks of %s failed", order.key)
                num_left = len(order.block_ids) - start
                text = f"publishing failed: {error}"
                outcome = ev.RangeFailed(order.first_block + start, num_left, ErrorKind.INTERNAL, text)
            self._reports.send_event(order.key, outcome)
            if isinstance(outcome, ev.RangeFailed):
                return

    def _publish_range(
        self, order: PublishOrder, start: int, end: int, unfinished: _Unfinished | None
    ) -> ev.BlockRange:
        first = order.first_block + start
        block_ids = order.block_ids[start:end]
        memory = self._regions[order.group]
        if unfinished is not None:  # its blocks are lent already
            if unfinished.error is not None:
                raise unfinished.error
            block_bytes = memory.layout.block_bytes
            if unfinished.num_bytes < block_bytes:
                self._digest(unfinished, order, block_bytes, start, end)
            return ev.BlockRange(first, unfinished.digests.values(start, end))
        if order.num_tokens:
            states_of(memory).check(block_ids, order.num_tokens)
        views = self._views[order.group].of(read_views(memory, block_ids))
        digests = digests_of(self.digest, views, order.seeds[start:end])
        return ev.BlockRange(first, digests, self._senders.publish(order.name, block_ids, first, order.group))

    def _digest(
        self,
        unfinished: _Unfinished,
        order: PublishOrder,
        num_bytes: int,
        start: int = 0,
        end: int | None = None,
    ) -> None:
        """Digest the bytes up to ``num_bytes`` of the blocks ``start``..``end`` - 1 of an order; None: all behind."""
        part = BlockPart(unfinished.num_bytes, num_bytes - unfinished.num_bytes)
        views = read_views(self._regions[order.group], order.block_ids[start:end], part)
        unfinished.digests.go_on(views, start)

    def _ranges(self, order: PublishOrder) -> Iterator[tuple[int, int]]:
        """Cut an order into ranges. On a device each one costs a launch, and reading it too, and none stays in a cache."""
        step = blocks_per_piece(self._regions[order.group].layout.block_bytes)
        if self._is_on_device:
            step = MAX_PIECE_BLOCKS
        num_blocks = len(order.block_ids)
        return ((start, min(start + step, num_blocks)) for start in range(0, num_blocks, step))


class CompletionEstimator:
    """A ``LayerWatch`` that estimates the end of a pass. Used for one pass after another.

    At first a pass is assumed to take as long as the last one of its size; later its remaining layers to take as long as
    those before, and what follows the last layer's KV as long as it usually did. report: called with each new estimate.
    """

    def __init__(
        self, num_layers: int, report: Callable[[float], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_layers = num_layers
        self._report = report
        self._clock = clock
        self._points = frozenset(max(2, round(share * num_layers)) for share in _SHARES)
        self._tails = deque[float](maxlen=_NUM_TAILS)
        self._seconds_per_block: dict[int, float] = {}
        self._num_blocks = 1
        self._begin = 0.0
        self._first = (0, 0.0)
        """The first number of layers that was stored in this pass, and when."""
        self._last = (0, 0.0)

    def begin(self, num_blocks: int) -> None:
        """Start a pass that computes ``num_blocks``."""
        self._num_blocks = num_blocks
        self._begin = self._clock()
        self._first = self._last = (0, 0.0)
        known = self._seconds_per_block.get(self._size)
        if known is not None:
            self._report(self._begin + known * num_blocks)

    def on_stored(self, num_layers: int) -> None:
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

    def on_computed(self) -> None:
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


class PassWatch:
    """A ``LayerWatch`` of one pass after another. Used from the step thread.

    Orders for blocks that were computed before are published when the pass begins: no later one writes them. It makes some
    orders readable group by group of layers, and publishes them before a token is sampled: the token travels through
    processes that compete with the publishing thread for processors. It also estimates when the pass will end.
    post: runs a job in the data thread.
    """

    def __init__(
        self, memory: KVMemory, publisher: Publisher, post: Callable[[Callable[[], None]], None]
    ) -> None:
        self._memory = memory
        self._publisher = publisher
        self._post = post
        layouts = [region.layout for region in memory.regions]
        self._num_layers = sum(layout.num_layers for layout in layouts if layout.parts != STATES)
        self._estimator = CompletionEstimator(
            self._num_layers, lambda end: post(partial(publisher.report_end, self._last, end))
        )
        # On a device a layer is reported when it is launched, from which no end can be estimated.
        self._can_estimate = memory.pool_view is not None
        self._split: list[PublishOrder] = []
        self._last: list[PublishOrder] = []
        self._published: list[PublishOrder] = []

    def begin(self, orders: Sequence[PublishOrder]) -> LayerWatch | None:
        """Start a pass that computes the blocks of these orders. Returns None if nothing watches it."""
        self._published = [order for order in orders if order.is_computed]
        self._publish(self._published)
        self._split = [order for order in orders if order.num_parts > 1]
        self._last = [order for order in orders if order.announces_end and self._can_estimate]
        if self._last:
            self._estimator.begin(sum(len(order.block_ids) for order in orders if order.group == 0))
        return self if self._split or self._last else None

    def on_stored(self, num_layers: int) -> None:
        """See LayerWatch."""
        layout = self._memory.layout
        due = [each for each in self._split if num_layers in split_points(self._num_layers, each.num_parts)]
        if due:
            computed = mark_computed(self._memory)
            num_bytes = layout.block_bytes // layout.num_layers * num_layers
            for order in due:
                self._post(partial(self._publisher.publish_layers, order, num_bytes, computed))
        if self._last:
            self._estimator.on_stored(num_layers)

    def on_computed(self) -> None:
        """See LayerWatch."""
        self._published += self._split
        self._publish(self._split)
        if self._last:
            self._estimator.on_computed()

    def end(self, orders: Sequence[PublishOrder]) -> None:
        """Publish the orders of a step that is over, but for those that were published before."""
        self._publish([order for order in orders if not any(order is each for each in self._published)])
        self._published = []

    def _publish(self, orders: Sequence[PublishOrder]) -> None:
        """Publish orders once the device has computed everything that was launched before."""
        if orders:
            computed = mark_computed(self._memory)
            for order in orders:
                self._post(partial(self._publisher.publish, order, computed))


@cache
def split_points(num_layers: int, num_parts: int) -> frozenset[int]:
    """Return after how many layers each of ``num_parts`` groups ends."""
    ends = (num_layers * part // num_parts for part in range(1, num_parts + 1))
    return frozenset(end for end in ends if end)
