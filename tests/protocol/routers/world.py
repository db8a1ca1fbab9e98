"""The explored world of several routers at one moment. A world is a value."""

from typing import NamedTuple


class PartState(NamedTuple):
    """A router or a worker. state: of its machine, None while it is dead."""

    name: str
    num_boots: int
    state: int | None

    @property
    def boot(self) -> str:
        """The name of this incarnation."""
        return f"{self.name}.{self.num_boots}"


class Session(NamedTuple):
    """The stream of a worker to a router. knows_router, knows_worker: that side has not detected its end."""

    name: str
    router: str
    worker: str
    to_router: tuple[bytes, ...] = ()
    to_worker: tuple[bytes, ...] = ()
    is_cut: bool = False
    knows_router: bool = True
    knows_worker: bool = True

    def cut(self) -> "Session":
        """Return the session without its frames, cut."""
        return self._replace(is_cut=True, to_router=(), to_worker=())


class Call(NamedTuple):
    """A call on its way to a worker. kind: ``decode`` or ``cancel``. number: of the request.

    started_attempt: of the leg that a cancel ends. is_late: the router waits for it no more.
    """

    kind: str
    session: str
    number: int
    attempt: int
    num_delivered: int = 0
    started_attempt: int = 0
    is_late: bool = False

    @property
    def router(self) -> str:
        """The incarnation that has sent it."""
        return self.session.partition(">")[0]

    @property
    def worker(self) -> str:
        """The incarnation that it is for."""
        return self.session.partition(">")[2].partition("/")[0]


class RoutersWorld(NamedTuple):
    """Everything that decides what can happen. num_sessions: sessions that were ever opened."""

    num_faults: int
    routers: tuple[PartState, ...]
    workers: tuple[PartState, ...]
    sessions: tuple[Session, ...] = ()
    calls: tuple[Call, ...] = ()
    num_sessions: int = 0
