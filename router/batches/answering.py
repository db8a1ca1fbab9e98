"""What the batches need of the rest of the router: somebody who answers one request body."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from contract.errors import ErrorKind


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The answer to a body, as HTTP would give it. body: JSON. kind: of the error; None for an answer.

    has_workers: whether the service could answer another request at that moment.
    """

    request_id: str
    status_code: int
    body: bytes
    kind: ErrorKind | None = None
    has_workers: bool = True


class AnswerBody(Protocol):
    """Answers a body in process, behind every request that does not belong to a batch."""

    async def __call__(
        self, endpoint: str, body: bytes, tenant: str, on_begun: Callable[[], None]
    ) -> Answered:
        """Answer ``body`` for ``tenant``. An error is an answer. Calls ``on_begun`` when the first token has come."""
