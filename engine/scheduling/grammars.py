"""Requests and their grammars: waiting for the compilation, following the answer, saying which tokens may be drawn.

A request with a grammar is in WAITING_FOR_FSM, without blocks, until it is compiled. A decode leg asks for its KV
meanwhile; where that has arrived first, it waits with its blocks in the same state.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.errors import InvalidRequestError, KvbatonError, OverloadedError, UnsupportedFieldError
from contract.grammars import reduced
from contract.requests import EngineRequest
from engine.connector import Received
from engine.grammar.compiler import GrammarCompiler, Outcome
from engine.outputs import SchedulerOutput
from engine.scheduling.ending import Ending, RequestStatus, ended_by
from engine.scheduling.request import Request
from engine.scheduling.step_plan import StepPlan


@dataclass
class _Wait:
    request: Request
    compiled: Future[Any] | None = None
    received: Received | None = None


@dataclass(frozen=True)
class Ready:
    """A request that waits for its grammar no more. ending: where there is none. received: its KV, where that came first."""

    request: Request
    ending: Ending | None
    received: Received | None


class Grammars:
    """Owns what requests wait for while their grammars are compiled. Used from the step thread.

    compiler: None refuses grammars. wake: called in another thread when a request is ready.
    """

    def __init__(
        self, compiler: GrammarCompiler | None, max_bytes: int, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._compiler = compiler
        self._max_bytes = max_bytes
        self._wake = wake
        self._waits: dict[str, _Wait] = {}
        self._outcomes: list[tuple[Request, Outcome]] = []

    @property
    def has_news(self) -> bool:
        """True when ``take_ready`` has something."""
        return bool(self._outcomes)

    def check(self, asked: EngineRequest) -> None:
        """Raise InvalidRequestError about ``grammar`` for one that is too long, and where none are served."""
        grammar = asked.sampling.grammar
        if grammar is None:
            return
        if self._compiler is None:
            raise UnsupportedFieldError("this engine serves no grammars", param="grammar")
        num_bytes = len(grammar.text.encode(errors="surrogatepass"))
        if num_bytes > self._max_bytes:
            num_bytes = len(reduced(grammar).text.encode(errors="surrogatepass"))
        if num_bytes > self._max_bytes:
            raise InvalidRequestError(
                f"the grammar has {num_bytes} bytes; this worker takes {self._max_bytes} at most "
                "(max_grammar_bytes): shorten it",
                param="grammar",
            )

    def start(self, request: Request) -> bool:
        """Have its grammar compiled; False where it has none."""
        grammar = request.asked.sampling.grammar
        if grammar is None or self._compiler is None:
            return False
        wait = self._waits[request.key] = _Wait(request)
        try:
            wait.compiled = self._compiler.start(
                request.asked, grammar, lambda outcome: self._note(request, outcome)
            )
        except KvbatonError as error:
            self._note(request, error)
        return True

    def keep(self, request: Request, received: Received) -> bool:
        """Its KV has arrived: keep it until its grammar is ready; False where nothing is waited for."""
        wait = self._waits.get(request.key)
        if wait is not None:
            wait.received = received
        return wait is not None

    def take_ready(self) -> list[Ready]:
        """Those that wait for their grammar no more, with their matchers in place."""
        ready = []
        while self._outcomes:
            request, outcome = self._outcomes.pop(0)
            wait = self._waits.get(request.key)
            if wait is None or wait.request is not request:
                continue
            del self._waits[request.key]
            ending = None
            if isinstance(outcome, KvbatonError):
                ending = ended_by(outcome)
            else:
                request.structured_output_request = outcome
                if request.status is RequestStatus.WAITING_FOR_FSM:
                    request.status = RequestStatus.WAITING
            ready.append(Ready(request, ending, wait.received))
        return ready

    def give_up(self, request: Request) -> None:
        """The request ended; its compilation goes on for others, and is dropped where nobody else needs it."""
        wait = self._waits.pop(request.key, None)
        grammar = request.asked.sampling.grammar
        if wait and wait.compiled and grammar and self._compiler:
            self._compiler.give_up(grammar, wait.compiled)

    def overdue(self, request: Request, seconds: float) -> Ending:
        """How a request ends whose grammar was not ready after ``seconds``: by its own fault if its turn had come."""
        compiled = self._waits[request.key].compiled
        error: KvbatonError = OverloadedError(
            f"other grammars took {seconds:g} s to compile, and this one's turn has not come: try again"
        )
        if compiled and (compiled.running() or compiled.done()):
            error = InvalidRequestError(
                f"the grammar was not compiled within {seconds:g} s: make it simpler", param="grammar"
            )
        return ended_by(error)

    @staticmethod
    def follow(request: Request) -> Ending | None:
        """Take in what the answer has got since; how it ends where nothing may follow and no token can say so."""
        matcher = request.structured_output_request
        if matcher is None:
            return None
        start = request.num_prompt_tokens - request.asked.num_delivered_tokens
        try:
            matcher.advance(request.token_ids[start + matcher.num_tokens :])
        except KvbatonError as error:
            return ended_by(error)
        return Ending(RequestStatus.FINISHED_STOPPED) if matcher.is_complete else None

    @staticmethod
    def mask(plan: StepPlan, output: SchedulerOutput) -> None:
        """Say in ``output`` what the requests with a grammar may draw that draw in this step."""
        rows: list[NDArray[np.int32]] = []
        for turn in plan:
            request, matcher = turn.request, turn.request.structured_output_request
            if matcher is not None and turn.num_tokens == request.num_missing_tokens:
                output.structured_output_request_ids[request.key] = len(rows)
                rows.append(matcher.bitmask)
        if rows:
            output.grammar_bitmask = np.stack(rows)

    def check_integrity(self, requests: dict[str, Request]) -> None:
        """Assert that who waits here lives, and that all in WAITING_FOR_FSM do."""
        assert all(requests.get(key) is wait.request for key, wait in self._waits.items())
        in_state = {key for key, r in requests.items() if r.status is RequestStatus.WAITING_FOR_FSM}
        assert in_state <= self._waits.keys()

    def _note(self, request: Request, outcome: Outcome) -> None:
        self._outcomes.append((request, outcome))
        self._wake()
