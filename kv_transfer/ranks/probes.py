"""Questions that every rank answers: can a source be read, and has a session begun; and receivers that ask the first."""

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial

from contract.errors import InternalError, TransferError
from engine.mailbox import Mailbox
from kv_transfer.protocol.reads import Read, ReadRequest, Source
from kv_transfer.ranks.rank_messages import Answer, BeginSession, EndSession, Probe, Stop, ToRank

_Errors = dict[int, str | None]


class RankQuestions:
    """Owns the questions that are open, by key. A question is over when every rank has answered it. Thread-safe.

    The ranks serve a peer's reads, so a peer's link is up only after its session has begun on all ranks. Otherwise the peer
    could show its token to a rank that refuses it.
    """

    def __init__(self, num_ranks: int, send_to_all: Callable[[ToRank], None]) -> None:
        self._num_ranks = num_ranks
        self._send_to_all = send_to_all
        self._lock = threading.Lock()
        self._open: dict[str, tuple[_Errors, Callable[[_Errors | None], None]]] = {}
        self._is_closed = False
        self._num_probes = itertools.count(1)

    def begin(self, token: str, then: Callable[[], None]) -> bool:
        """See ``SessionBook``; ``then`` is not called if the session ends before."""
        self._ask(token, BeginSession(token), lambda errors: None if errors is None else then())
        return False

    def end(self, token: str) -> None:
        """See ``SessionBook``."""
        with self._lock:
            self._open.pop(token, None)
        self._send_to_all(EndSession(token))

    def probe(self, source: Source, read: Read) -> None:
        """Block until all ranks have tried to read a source. Raises TransferError with the ranks that cannot, and why."""
        key = f"probe {next(self._num_probes)}"
        answers = Mailbox[_Errors | None]()
        self._ask(key, Probe(key, source), answers.put)
        read.when_stopped(partial(self._send_to_all, Stop(key)))
        errors = answers.get()
        read.check()
        if errors is None:
            raise TransferError("the ranks have ended")
        failed = [f"rank {rank}: {error}" for rank, error in sorted(errors.items()) if error is not None]
        if failed:
            raise TransferError("; ".join(failed))

    def answer(self, rank: int, answer: Answer) -> None:
        """Take a rank's answer."""
        with self._lock:
            if answer.key not in self._open:
                return
            errors, then = self._open[answer.key]
            errors[rank] = answer.error
            if len(errors) < self._num_ranks:
                return
            del self._open[answer.key]
        then(errors)

    def close(self) -> None:
        """End all questions, those that will be asked too: the ranks have ended."""
        with self._lock:
            self._is_closed = True
            questions = list(self._open.values())
            self._open.clear()
        for _, then in questions:
            then(None)

    def _ask(self, key: str, message: ToRank, then: Callable[[_Errors | None], None]) -> None:
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._open[key] = ({}, then)
        if is_closed:
            then(None)
        else:
            self._send_to_all(message)


class RankReceiver:
    """A transport over which the ranks read; the chooser has it in place of a receiver.

    forget, probe: see ReceiverTransport and Probing; without ``probe`` the transport is chosen untried.
    """

    def __init__(
        self, forget: Callable[[Source], None], probe: Callable[[Source, Read], None] | None = None
    ) -> None:
        self.forget = forget
        if probe is not None:
            self.probe = probe

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Raise InternalError: jobs are sent to the ranks."""
        raise InternalError(f"blocks of worker {source.worker_id} are read by the ranks")

    def close(self) -> None:
        """Do nothing: the ranks close what they have opened."""
