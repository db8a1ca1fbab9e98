"""The interface through which batches have their requests answered."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from contract.errors import ErrorKind


@dataclass(frozen=True, kw_only=True)
class LineAnswer:
    """The answer to a line's body, with the status that HTTP would have. body: JSON. kind: of an error, else None.

    has_workers: True if the service could answer another request at that moment.
    """

    request_id: str
    status_code: int
    body: bytes
    kind: ErrorKind | None = None
    has_workers: bool = True


class AnswerLine(Protocol):
    """Answers the body of a line, at a lower priority than every request that does not belong to a batch."""

    async def __call__(
        self, endpoint: str, body: bytes, tenant: str, on_begun: Callable[[], None]
    ) -> LineAnswer:
        """Answer ``body`` for ``tenant``. An error is an answer. Calls ``on_begun`` when the first token has arrived."""
