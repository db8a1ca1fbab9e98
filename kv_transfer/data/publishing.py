"""The publishing side of the data half: digests what is lent, and makes it readable."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from contract.errors import ErrorKind
from engine.connector import KVMemory, LayerWatch
from kv_transfer.data.digesting import DigestViews, UnfinishedBlocks
from kv_transfer.data.layer_watch import PassListeners
from kv_transfer.data.threads import DataReports
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.digests import digests_of
from kv_transfer.protocol.orders import PublishOrder
from kv_transfer.protocol.reads import blocks_per_piece
from kv_transfer.transports.block_views import read_views
from kv_transfer.transports.lending import Lending

logger = logging.getLogger(__name__)


class Publisher:
    """Owns the digests of blocks that are being computed. Orders come from the step thread; ``post`` runs them elsewhere.

    post: runs jobs in one thread, in the order in which they are posted.
    """

    def __init__(
        self,
        memory: KVMemory,
        views: DigestViews,
        senders: Lending,
        reports: DataReports,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._memory = memory
        self._views = views
        self._senders = senders
        self._reports = reports
        self._post = post
        self._listeners = PassListeners(memory, self)
        self._unfinished: dict[str, UnfinishedBlocks] = {}

    def watch(self, orders: Sequence[PublishOrder]) -> LayerWatch | None:
        """Return what watches the forward pass of these orders, if anything does."""
        return self._listeners.begin(orders)

    def execute(self, orders: Sequence[PublishOrder]) -> None:
        """Publish the blocks of a forward pass that is over, except those that were published during it."""
        for order in orders:
            if not self._listeners.has_published(order):
                self.post_order(order)

    def post_layers(self, order: PublishOrder, num_bytes: int) -> None:
        """See PassJobs."""
        self._post(partial(self._publish_layers, order, num_bytes))

    def post_order(self, order: PublishOrder) -> None:
        """See PassJobs."""
        self._post(partial(self._publish, order))

    def post_end(self, orders: Sequence[PublishOrder], end: float) -> None:
        """See PassJobs."""
        self._post(partial(self._report_end, orders, end))

    def _publish_layers(self, order: PublishOrder, num_bytes: int) -> None:
        is_new = order.key not in self._unfinished
        unfinished = self._unfinished.setdefault(order.key, UnfinishedBlocks(order.block_ids, order.seeds))
        try:
            unfinished.advance(self._memory, num_bytes)
            for start, end in self._ranges(order):
                grants = self._senders.publish(order.name, order.block_ids[start:end]) if is_new else ()
                ready = ev.LayersReady(order.first_block + start, end - start, num_bytes, grants)
                self._reports.send_event(order.key, ready)
        except Exception as error:  # noqa: BLE001 - the boundary of a job: the range fails once it is published
            unfinished.error = error

    def _report_end(self, orders: Sequence[PublishOrder], end: float) -> None:
        seconds = max(0.0, end - time.monotonic())
        for order in orders:
            self._reports.send_event(order.key, ev.EndForeseen(seconds))

    def _publish(self, order: PublishOrder) -> None:
        """Publish range by range: the receiver copies and verifies one while the next is being digested."""
        unfinished = self._unfinished.pop(order.key, None)
        for start, end in self._ranges(order):
            outcome: ev.SendEvent
            try:
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
        self, order: PublishOrder, start: int, end: int, unfinished: UnfinishedBlocks | None
    ) -> ev.RangeReady:
        first = order.first_block + start
        if unfinished is not None:  # its blocks are lent already
            return ev.RangeReady(first, unfinished.finish(self._memory, start, end))
        block_ids = order.block_ids[start:end]
        views = self._views.of(read_views(self._memory, block_ids))
        digests = digests_of(views, order.seeds[start:end])
        return ev.RangeReady(first, digests, self._senders.publish(order.name, block_ids))

    def _ranges(self, order: PublishOrder) -> Iterator[tuple[int, int]]:
        step = blocks_per_piece(self._memory.layout.block_bytes)
        num_blocks = len(order.block_ids)
        return ((start, min(start + step, num_blocks)) for start in range(0, num_blocks, step))
