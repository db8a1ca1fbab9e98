"""What the orders of one step have to do while its forward pass runs, and as soon as that is over."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from engine.connector import KVMemory
from kv_transfer.digesting import split_points
from kv_transfer.orders import PublishOrder

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
        self._orders, self._memory, self._post = orders, memory, post
        self._read_layers, self._publish = read_layers, publish
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
