"""The explored world of several routers at one moment. A world is a value."""

from collections.abc import Iterable
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
    """A call on its way to a worker. kind: ``prefill``, ``decode``, ``hand_off`` or ``cancel``. number: of the request.

    started_attempt: of the leg that a cancel ends; a hand-off has the next attempt in its place. source: the incarnation
    that lends to this leg. is_late: the router waits for it no more.
    """

    kind: str
    session: str
    number: int
    attempt: int
    num_delivered: int = 0
    started_attempt: int = 0
    source: str = ""
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
    """Everything that decides what can happen. num_sessions: sessions that were ever opened. links: between workers."""

    num_faults: int
    routers: tuple[PartState, ...]
    workers: tuple[PartState, ...]
    sessions: tuple[Session, ...] = ()
    calls: tuple[Call, ...] = ()
    num_sessions: int = 0
    links: tuple[Link, ...] = ()


def call_of(kind: str, session: str, number: int, attempt: int, num: int, source: str | None) -> Call:
    """num: tokens that were delivered before, the attempt of the leg that a cancel ends, or the next one of a hand-off."""
    return Call(kind, session, number, attempt, num, num, source or "")


def transfer_of(call: Call) -> SendTransfer | ReceiveTransfer | None:
    """Return the hand-over that a call is part of, if any."""
    if not call.source:
        return None
    name = f"t{call.number}"
    receive = ReceiveTransfer(name, call.source.partition(".")[0], call.source, "127.0.0.1:1")
    return SendTransfer(name) if call.kind == "prefill" else receive


def is_started_by(cancel: Call, call: Call) -> bool:
    """Return True if ``call`` starts the leg that is cancelled, and its router waits for it: it cancels after that."""
    is_same = (call.session, call.number, call.attempt) == (
        cancel.session,
        cancel.number,
        cancel.started_attempt,
    )
    return call.kind in ("prefill", "decode") and is_same and not call.is_late


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
