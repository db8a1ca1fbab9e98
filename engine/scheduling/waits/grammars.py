"""The wait stage of grammars.

A request with a grammar waits in WAITING_FOR_FSM, without blocks, until the grammar is compiled. A decode leg fetches its KV
meanwhile; if that arrives first, the request waits with its blocks in the same state. The grammar of a request that is to be
moved here is prepared before that, so that little is left to compile while its client waits.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from contract.errors import InvalidRequestError, KvbatonError, OverloadedError, UnsupportedFieldError
from contract.json_schema import reduced
from contract.requests import EngineRequest
from engine.grammar.compiler import GrammarCompiler, Outcome
from engine.scheduling.requests.finish import Finish, RequestStatus
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.stopping import finish_by
from engine.scheduling.waits.waits import Ready


@dataclass
class _Wait:
    request: Request
    compiled: Future[Any] | None = None


class Grammars:
    """The wait stage of compilations. Owns the requests that wait for one. Used from the step thread.

    compiler: None rejects grammars. timeout_seconds: how long a request may have this stage's status. wake: called in
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
        """True while ``pop_ready`` would return something."""
        return bool(self._outcomes)

    def check(self, engine_request: EngineRequest) -> None:
        """Raise InvalidRequestError for a grammar that is too long, and for any if none are served."""
        grammar = engine_request.sampling.grammar
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
        return request.engine_request.sampling.grammar is not None and self._compiler is not None

    def start(self, request: Request) -> None:
        """Start the compilation of the request's grammar."""
        grammar = request.engine_request.sampling.grammar
        assert grammar is not None and self._compiler is not None, "the request needs no wait"
        wait = self._waits[request.key] = _Wait(request)
        try:
            wait.compiled = self._compiler.start(
                request.engine_request, grammar, lambda outcome: self._note(request, outcome)
            )
        except KvbatonError as error:
            self._note(request, error)

    def prepare(self, engine_request: EngineRequest, then: Callable[[], None]) -> None:
        """Compile the grammar of a request that is not here yet, and follow the tokens that it has delivered.

        The compilation is cached, with what its masks needed until then. ``then`` is called when that is over, even if it
        has failed, and in another thread if there is something to compile; after it ``wake``. Raises OverloadedError.
        """

        def end(_: Outcome | None = None) -> None:
            then()
            self._wake()

        grammar = engine_request.sampling.grammar
        if grammar is None or self._compiler is None:
            end()
        else:
            self._compiler.start(engine_request, grammar, end)

    def pop_ready(self) -> list[Ready]:
        """Return the requests whose compilation has ended, with their matchers in place."""
        ready = []
        while self._outcomes:
            request, outcome = self._outcomes.pop(0)
            wait = self._waits.get(request.key)
            # A request that has finished: another one may have its key.
            if wait is None or wait.request is not request:
                continue
            del self._waits[request.key]
            if isinstance(outcome, KvbatonError):
                ready.append(Ready(request, finish_by(request, outcome)))
            else:
                request.structured_output_request = outcome
                # Only the empty text matches, and no token ends it: without this it would be sampled without a grammar.
                is_over = outcome.is_complete
                ready.append(Ready(request, Finish(RequestStatus.FINISHED_STOPPED) if is_over else None))
        return ready

    def give_up(self, request: Request) -> bool:
        """Stop waiting: the compilation continues for others, or is dropped if it has not begun."""
        wait = self._waits.pop(request.key, None)
        grammar = request.engine_request.sampling.grammar
        if wait and wait.compiled and grammar and self._compiler:
            self._compiler.give_up(grammar, wait.compiled)
        return False

    def overdue(self, request: Request, seconds: float) -> Finish:
        """Return how a request finishes whose grammar is not ready after ``seconds``.

        It is the request's own fault only if its compilation had begun.
        """
        compiled = self._waits[request.key].compiled
        error: KvbatonError = OverloadedError(
            f"other grammars took {seconds:g} s to compile, and this one's turn has not come: try again"
        )
        if compiled and (compiled.running() or compiled.done()):
            error = InvalidRequestError(
                f"the grammar was not compiled within {seconds:g} s: make it simpler", param="grammar"
            )
        return Finish.by(error)

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Assert that each request that waits here is live, and that all in WAITING_FOR_FSM wait here."""
        assert all(requests.get(key) is wait.request for key, wait in self._waits.items())
        assert {key for key, one in requests.items() if one.status is self.status} <= self._waits.keys()

    def _note(self, request: Request, outcome: Outcome) -> None:
        self._outcomes.append((request, outcome))
        self._wake()
