"""Who listens to forward passes: what the orders of a step have to do during it, and who wants to know when it ends."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.connector import KVMemory, LayerWatch
from kv_transfer.data.completion_estimator import CompletionEstimator
from kv_transfer.data.digesting import split_points
from kv_transfer.protocol.orders import PublishOrder
from kv_transfer.transports.block_views import is_flat

Post = Callable[[Callable[[], None]], None]
"""Have the data thread do it, in the order of the calls."""


class SplitOrders:
    """A ``LayerWatch``: makes blocks readable group by group of layers, and publishes them before a token is sampled.

    The token goes out through processes that take processors away from the thread that publishes. read_layers: make so
    many bytes of each block of an order readable. publish: the rest of it. Used from the step thread.
    """

    def __init__(
        self,
        orders: Sequence[PublishOrder],
        memory: KVMemory,
        post: Post,
        read_layers: Callable[[PublishOrder, int], None],
        publish: Callable[[PublishOrder], None],
    ) -> None:
        self._orders = orders
        self._memory = memory
        self._post = post
        self._read_layers = read_layers
        self._publish = publish
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
                num_bytes = layout.block_bytes // layout.num_layers * num_layers
                self._post(partial(self._read_layers, order, num_bytes))

    def computed(self) -> None:
        """See LayerWatch."""
        self._are_published = True
        self._memory.mark_computed()
        for order in self._orders:
            self._post(partial(self._publish, order))

    def has_published(self, order: PublishOrder) -> bool:
        """The order needs nothing more."""
        return self._are_published and any(order is each for each in self._orders)


@dataclass(frozen=True)
class PassJobs:
    """What the data thread does for a pass.

    read_layers, publish: see ``SplitOrders``. foresee: tell the receivers of these orders when the pass ends, by the clock.
    """

    post: Post
    read_layers: Callable[[PublishOrder, int], None]
    publish: Callable[[PublishOrder], None]
    foresee: Callable[[Sequence[PublishOrder], float], None]


class PassListeners:
    """A ``LayerWatch`` of one pass after another, for as many listeners as one has. Used from the step thread."""

    def __init__(self, memory: KVMemory, jobs: PassJobs) -> None:
        self._memory = memory
        self._jobs = jobs
        self._estimator = CompletionEstimator(memory.layout.num_layers) if is_flat(memory) else None
        """On a device a layer is told when it is launched, which says nothing of the end."""
        self._split: SplitOrders | None = None
        self._listeners: list[LayerWatch] = []

    def begin(self, orders: Sequence[PublishOrder]) -> LayerWatch | None:
        """A pass begins that computes these blocks; None: nobody listens to it."""
        jobs = self._jobs
        self._split = None
        self._listeners = []
        if split := [order for order in orders if order.num_parts > 1]:
            self._split = SplitOrders(split, self._memory, jobs.post, jobs.read_layers, jobs.publish)
            self._listeners.append(self._split)
        last = [order for order in orders if order.announces_end]
        if last and self._estimator is not None:
            num_blocks = sum(len(order.block_ids) for order in orders)
            self._estimator.begin(num_blocks, lambda end: jobs.post(partial(jobs.foresee, last, end)))
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
        """The order was carried out before its step was over."""
        return self._split is not None and self._split.has_published(order)
