"""Receivers whose bytes move in the ranks: beside the chooser stands only whether a peer can be read, by all of them."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from contract.errors import InternalError, TransferError
from kv_transfer.protocol.reads import Read, ReadRequest, Source
from kv_transfer.ranks.words import Stop, ToRank, Tried, TryPeer
from kv_transfer.transports.transport import ReceiverTransport


@dataclass
class _Trial:
    """why_not: by rank. is_over: set when all ranks have answered."""

    why_not: dict[int, str | None] = field(default_factory=dict)
    is_over: threading.Event = field(default_factory=threading.Event)


class Trials:
    """Has all ranks try whether a source can be read. Thread-safe.

    new_number: like no other of a job or trial.
    """

    def __init__(self, num_ranks: int, new_number: Callable[[], int], say: Callable[[ToRank], None]) -> None:
        self._num_ranks = num_ranks
        self._new_number = new_number
        self._say = say
        self._lock = threading.Lock()
        self._trials: dict[int, _Trial] = {}
        self._is_closed = False

    def run(self, source: Source, read: Read) -> None:
        """Block until all ranks have answered. Raises TransferError that says which cannot read it, and why."""
        number = self._new_number()
        trial = _Trial()
        with self._lock:
            if self._is_closed:
                raise TransferError("the ranks have ended")
            self._trials[number] = trial
        try:
            self._say(TryPeer(number, source))
            read.when_stopped(partial(self._say, Stop(number)))
            trial.is_over.wait()
        finally:
            with self._lock:
                del self._trials[number]
        read.check()
        failed = [f"rank {rank}: {why}" for rank, why in sorted(trial.why_not.items()) if why is not None]
        if failed:
            raise TransferError("; ".join(failed))

    def tried(self, rank: int, outcome: Tried) -> None:
        """A rank's answer."""
        with self._lock:
            trial = self._trials.get(outcome.number)
            if trial is None:
                return
            trial.why_not[rank] = outcome.why_not
            if len(trial.why_not) == self._num_ranks:
                trial.is_over.set()

    def close(self) -> None:
        """Nobody answers any more: what runs fails."""
        with self._lock:
            self._is_closed = True
            trials = list(self._trials.values())
        for trial in trials:
            trial.why_not[-1] = "the ranks have ended"
            trial.is_over.set()


class RankReceiver:
    """Stands beside the chooser for a transport of the ranks' own. forget: has the ranks forget a source."""

    def __init__(self, forget: Callable[[Source], None]) -> None:
        self._forget = forget

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Never called: jobs go to the ranks. Raises InternalError."""
        raise InternalError(f"blocks of worker {source.worker_id} are read by the ranks")

    def forget(self, source: Source) -> None:
        """See ReceiverTransport."""
        self._forget(source)

    def close(self) -> None:
        """The ranks close what they have opened."""


class TriedRankReceiver(RankReceiver):
    """One that has to be tried."""

    def __init__(self, forget: Callable[[Source], None], trials: Trials) -> None:
        super().__init__(forget)
        self._trials = trials

    def probe(self, source: Source, read: Read) -> None:
        """Raise what keeps a rank from reading it."""
        self._trials.run(source, read)


def rank_receivers(
    names: Iterable[str], probing: set[str], forget: Callable[[Source], None], trials: Trials
) -> Mapping[str, ReceiverTransport]:
    """One for each transport that all ranks can read over."""
    return {
        name: TriedRankReceiver(forget, trials) if name in probing else RankReceiver(forget) for name in names
    }
