"""The tokens of one attempt, between the workers that emit them and the client that reads them."""

from collections.abc import Callable, Coroutine
from typing import Any

from contract.errors import KvbatonError
from contract.outputs import EngineOutput
from protos import worker_pb2 as pb
from router.tokens.delivery import Delivery, Token, TokenBatch, tokens_of
from router.tokens.inbox import Inbox, Take, UnreadAccount, size_of


class AttemptOutput:
    """Owns the tokens that have arrived too early, those that the client has not read, and the end of the answer.

    num_delivered: tokens that earlier attempts have delivered. unread: counts what the client has not read, of which this
    answer may hold max_bytes. It belongs to one attempt (``belong_to``), and if the answer is moved to another worker, to
    the one that continues it.
    """

    def __init__(self, num_delivered: int, unread: UnreadAccount, max_bytes: int) -> None:
        self._delivery = Delivery(next_index=num_delivered)
        self._inbox: Inbox[TokenBatch] = Inbox(unread, max_bytes)
        self._due: list[Token] = []
        self._entries: list[pb.TokenEntry] = []
        self._end: EngineOutput | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer that were passed on to the client, those of earlier attempts included."""
        return self._delivery.next_index

    @property
    def is_complete(self) -> bool:
        """True if the end of the answer and all tokens before it have arrived."""
        return self._end is not None and self._delivery.is_complete

    @property
    def unread(self) -> list[int]:
        """The tokens that the client has not read yet, in order."""
        return [token.token_id for batch in self._inbox.unread for token in batch.tokens]

    def belong_to(self, attempt: int, on_overflow: Callable[[], None]) -> None:
        """Take what follows from this attempt only. on_overflow: called when too much is unread."""
        self._delivery.continue_as(attempt)
        self._inbox.on_overflow = on_overflow

    def add(self, output: EngineOutput, entry: pb.TokenEntry) -> None:
        """Take the tokens of a worker's output. entry: counts with its size while the client has not read it."""
        self._due += self._delivery.accept(output.attempt, tokens_of(output))
        self._entries.append(entry)

    def end_with(self, output: EngineOutput, num_tokens: int) -> None:
        """Record that the answer ends with this output, after ``num_tokens`` tokens."""
        self._end = output
        self._delivery.end = num_tokens

    def release(self) -> None:
        """Pass the tokens that are due on to the client, and with the last ones the end of the answer."""
        if self._end and self.is_complete:
            batch = TokenBatch(self._due, *self._end.end, self._end.pooled or ())
        elif self._due:
            batch = TokenBatch(self._due)
        else:
            return
        self._due = []
        entries = self._entries
        self._entries = []
        if not self._inbox.offer(batch):
            self._inbox.put(batch, sum(map(size_of, entries)))

    def fail(self, error: KvbatonError) -> None:
        """Raise ``error`` at the client behind the tokens that it has not read."""
        self._inbox.put(error)

    def next(self, take: Take[TokenBatch] | None) -> Coroutine[Any, Any, TokenBatch]:
        """Return the next tokens that ``take`` does not take. Raises the error with which the attempt has failed."""
        return self._inbox.get(take)

    def close(self) -> None:
        """Drop what the client has not read."""
        self._inbox.close()
