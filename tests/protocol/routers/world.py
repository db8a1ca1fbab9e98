"""The explored world of several routers at one moment. A world is a value."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from contract.requests import ReceiveTransfer, SendTransfer
from tests.protocol.link import Link


class PartState(NamedTuple):
    """A router or a worker. state: of its machine, None while it is dead."""

    name: str
    num_boots: int
    state: int | None

    @property
    def boot(self) -> str:
        """The name of this incarnation."""
        return f"{self.name}.{self.num_boots}"

    @property
    def is_prefill(self) -> bool:
        """True for a worker that lends KV, and does not fetch it."""
        return self.name.startswith("P")


class Order(NamedTuple):
    """An order about a leg, on the stream of its worker.

    kind: ``prefill``, ``decode`` or ``cancel``. number: of the request. num_delivered: tokens that were delivered before.
    source: the incarnation that lends to this leg. is_late: the router waits for it no more.
    """

    kind: str
    number: int
    attempt: int
    num_delivered: int = 0
    source: str = ""
    is_late: bool = False

    @property
    def transfer(self) -> SendTransfer | ReceiveTransfer | None:
        """The hand-over that it is part of, if any."""
        if not self.source:
            return None
        name = f"t{self.number}"
        receive = ReceiveTransfer(name, self.source.partition(".")[0], self.source, "127.0.0.1:1")
        return SendTransfer(name) if self.kind == "prefill" else receive


class Session(NamedTuple):
    """The stream of a worker to a router. knows_router, knows_worker: that side has not detected its end.

    orders: those that the worker has not received, in the sequence in which they were given.
    """

    name: str
    router: str
    worker: str
    to_router: tuple[bytes, ...] = ()
    to_worker: tuple[bytes, ...] = ()
    is_cut: bool = False
    knows_router: bool = True
    knows_worker: bool = True
    orders: tuple[Order, ...] = ()

    def cut(self) -> "Session":
        """Return the session without its frames, cut."""
        return self._replace(is_cut=True, to_router=(), to_worker=(), orders=())

    def next_orders(self) -> Iterator[int]:
        """Return the indices of the orders that may arrive next; see ``router.workers.order_stream.OrderStream``.

        Starts arrive in their sequence, and so do cancels. A cancel arrives behind the starts that were given before it.
        """
        starts = [index for index, order in enumerate(self.orders) if order.kind != "cancel"]
        cancels = [index for index, order in enumerate(self.orders) if order.kind == "cancel"]
        yield from starts[:1]
        yield from (index for index in cancels[:1] if starts[:1] > [index] or not starts)


class Call(NamedTuple):
    """A call on its way to a worker: that it hands a request off. number: of the request."""

    session: str
    number: int
    attempt: int
    next_attempt: int

    @property
    def router(self) -> str:
        """The incarnation that has sent it."""
        return self.session.partition(">")[0]

    @property
    def worker(self) -> str:
        """The incarnation that it is for."""
        return self.session.partition(">")[2].partition("/")[0]


class RoutersWorld(NamedTuple):
    """Everything that decides what can happen. num_sessions: sessions that were ever opened. links: between workers."""

    num_faults: int
    routers: tuple[PartState, ...]
    workers: tuple[PartState, ...]
    sessions: tuple[Session, ...] = ()
    calls: tuple[Call, ...] = ()
    num_sessions: int = 0
    links: tuple[Link, ...] = ()


def remembered(sessions: Iterable[Session]) -> tuple[Session, ...]:
    """Return the sessions of which a side has not detected the end, sorted."""
    return tuple(sorted(one for one in sessions if one.knows_router or one.knows_worker))


def is_known(world: RoutersWorld, router: PartState, worker: PartState) -> bool:
    """Return True if the worker cannot open a session: it has one, or the router has one of its former incarnation."""
    return any(
        one.router == router.boot
        and (
            (one.worker == worker.boot and one.knows_worker)
            or (
                one.worker != worker.boot and one.worker.partition(".")[0] == worker.name and one.knows_router
            )
        )
        for one in world.sessions
    )
