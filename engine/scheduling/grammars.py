"""Requests and their grammars: the wait for the compilation, and which tokens an answer may draw next.

A request with a grammar waits in WAITING_FOR_FSM, without blocks, until it is compiled. A decode leg fetches its KV
meanwhile; where that has arrived first, it waits with its blocks in the same state.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.errors import InvalidRequestError, KvbatonError, OverloadedError, UnsupportedFieldError
from contract.grammars import reduced
from contract.requests import EngineRequest
from engine.grammar.compiler import GrammarCompiler, Outcome
from engine.outputs import SchedulerOutput
from engine.scheduling.ending import Ending, RequestStatus, ended_by
from engine.scheduling.request import Request
from engine.scheduling.step_plan import StepPlan
from engine.scheduling.waits import Ready


@dataclass
class _Wait:
    request: Request
    compiled: Future[Any] | None = None


class Grammars:
    """The wait stage of compilations. Owns what requests wait for. Used from the step thread.

    compiler: None refuses grammars. timeout_seconds: how long a request may have this stage's status. wake: called in
    another thread when a request is ready.
    """

    name = "grammar"
    status = RequestStatus.WAITING_FOR_FSM

    def __init__(
        self,
        compiler: GrammarCompiler | None,
        max_bytes: int,
        timeout_seconds: float,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._compiler = compiler
        self._max_bytes = max_bytes
        self.timeout_seconds = timeout_seconds
        self._wake = wake
        self._waits: dict[str, _Wait] = {}
        self._outcomes: list[tuple[Request, Outcome]] = []

    @property
    def has_pending(self) -> bool:
        """Return whether a compilation has ended."""
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

    def needs_wait(self, request: Request) -> bool:
        """Return whether the request has a grammar."""
        return request.asked.sampling.grammar is not None and self._compiler is not None

    def start(self, request: Request) -> None:
        """Have the request's grammar compiled."""
        grammar = request.asked.sampling.grammar
        assert grammar is not None and self._compiler is not None, "it needs no wait"
        wait = self._waits[request.key] = _Wait(request)
        try:
            wait.compiled = self._compiler.start(
                request.asked, grammar, lambda outcome: self._note(request, outcome)
            )
        except KvbatonError as error:
            self._note(request, error)

    def take_ready(self) -> list[Ready]:
        """Return the requests whose compilation has ended, with their matchers in place."""
        ready = []
        while self._outcomes:
            request, outcome = self._outcomes.pop(0)
            wait = self._waits.get(request.key)
            if wait is None or wait.request is not request:
                continue
            del self._waits[request.key]
            if isinstance(outcome, KvbatonError):
                ready.append(Ready(request, ended_by(outcome)))
            else:
                request.structured_output_request = outcome
                ready.append(Ready(request))
        return ready

    def give_up(self, request: Request) -> bool:
        """Stop waiting for a request that ends: its compilation goes on for others, or is dropped where it has not begun."""
        wait = self._waits.pop(request.key, None)
        grammar = request.asked.sampling.grammar
        if wait and wait.compiled and grammar and self._compiler:
            self._compiler.give_up(grammar, wait.compiled)
        return False

    def overdue(self, request: Request, seconds: float) -> Ending:
        """Return how a request ends whose grammar is not ready after ``seconds``: by its own fault if its turn had come."""
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
        """Advance the matcher over the newest tokens; return how the answer ends where its grammar allows nothing more."""
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
        """Put into ``output`` the tokens that requests with a grammar may draw in this step."""
        rows: list[NDArray[np.int32]] = []
        for entry in plan:
            request = entry.request
            matcher = entry.request.structured_output_request
            if matcher is not None and entry.num_tokens == request.num_missing_tokens:
                output.structured_output_request_ids[request.key] = len(rows)
                rows.append(matcher.bitmask)
        if rows:
            output.grammar_bitmask = np.stack(rows)

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Assert that each request that waits here is alive, and that all in WAITING_FOR_FSM wait here."""
        assert all(requests.get(key) is wait.request for key, wait in self._waits.items())
        assert {key for key, one in requests.items() if one.status is self.status} <= self._waits.keys()

    def _note(self, request: Request, outcome: Outcome) -> None:
        self._outcomes.append((request, outcome))
        self._wake()
