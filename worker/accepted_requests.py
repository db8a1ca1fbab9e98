"""The requests that routers have given to a worker, and the sessions that they belong to."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from contract.requests import EngineRequest, SendTransfer
from worker.credit_shares import Use


@dataclass(frozen=True)
class Accepted:
    """A request, and the session on whose stream its tokens are sent. since: when its order arrived."""

    request: EngineRequest
    session: str
    since: float


class AcceptedRequests:
    """Owns the choices that are accepted and not finished, by the engine's key, and counts them for each session."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._choices: dict[str, Accepted] = {}
        self._uses: dict[str, Use] = {}
        self._most: dict[str, Use] = {}

    def __len__(self) -> int:
        return len(self._choices)

    def __contains__(self, key: str) -> bool:
        return key in self._choices

    def __iter__(self) -> Iterator[EngineRequest]:
        return (accepted.request for accepted in list(self._choices.values()))

    def of_session(self, session: str) -> list[EngineRequest]:
        """Return the requests of a session, each once."""
        found = (accepted for accepted in self._choices.values() if accepted.session == session)
        return list({id(accepted): accepted.request for accepted in found}.values())

    def add(self, request: EngineRequest, session: str, since: float) -> None:
        """Record all choices of a request that the engine has accepted. since: when its order arrived."""
        self._choices.update(dict.fromkeys(request.keys, Accepted(request, session, since)))
        self._count(session, request.num_choices, request.num_choices * _tokens_of_choice(request))

    def session_of(self, key: str) -> str | None:
        """Return the session of a choice; None if it has finished."""
        accepted = self._choices.get(key)
        return accepted.session if accepted else None

    def seconds_since_order(self, key: str) -> float:
        """Return how long ago the order of a choice arrived; 0 if it has finished."""
        accepted = self._choices.get(key)
        return self.clock() - accepted.since if accepted else 0.0

    def finish(self, key: str) -> None:
        """Remove a choice whose last output has come. Does nothing the second time."""
        if accepted := self._choices.pop(key, None):
            self._count(accepted.session, -1, -_tokens_of_choice(accepted.request))

    def take_uses(self) -> dict[str, Use]:
        """Return the most that each session had at once since the last call."""
        most = self._most
        self._most = dict(self._uses)
        return most

    def _count(self, session: str, num_requests: int, num_tokens: int) -> None:
        use = self._uses.get(session, Use())
        use = Use(use.num_requests + num_requests, use.num_tokens + num_tokens)
        most = self._most.get(session, Use())
        self._most[session] = Use(
            max(most.num_requests, use.num_requests), max(most.num_tokens, use.num_tokens)
        )
        if use.num_requests:
            self._uses[session] = use
        else:
            self._uses.pop(session, None)


def _tokens_of_choice(request: EngineRequest) -> int:
    """Return about what a choice takes of the worker's tokens; its prompt is divided among the choices."""
    prompt = -(-len(request.prompt_token_ids) // request.num_choices)
    is_prefill = isinstance(request.transfer, SendTransfer) or request.pooling_params is not None
    return prompt if is_prefill else prompt + request.sampling.max_tokens
