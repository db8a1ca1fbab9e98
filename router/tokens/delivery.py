"""The tokens of one choice, in order and each once, between the workers that emit them and the client that reads them."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from contract.errors import KvbatonError
from contract.outputs import EngineOutput, FinishReason, TokenLogprobs
from protos import worker_pb2 as pb
from router.tokens.inbox import Consume, Inbox, UnreadAccount, size_of


class Token(msgspec.Struct):
    """One token of an answer, at ``index`` from its beginning.

    text_offset: characters of the answer's text that are certain before it; the answer sets it, once.
    """

    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    text_offset: int = 0


class TokenBatch(msgspec.Struct, frozen=True):
    """Tokens that are due now, in order. ``finish_reason`` is set with the answer's last ones, or with its embedding."""

    tokens: list[Token]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    embedding: Sequence[float] = ()


def tokens_of(output: EngineOutput) -> list[Token]:
    """Return the tokens of a worker's output, each with its index and, if the worker sent them, log probabilities."""
    logprobs = output.logprobs
    if logprobs is None and len(output.token_ids) == 1:  # most outputs are that
        return [Token(output.first_index, output.token_ids[0])]
    logprobs = logprobs or []
    return [
        Token(output.first_index + i, token_id, logprobs[i] if i < len(logprobs) else None)
        for i, token_id in enumerate(output.token_ids)
    ]


class Delivery:
    """Releases index i only after i − 1, and drops repeats and tokens of other attempts.

    Owns the tokens that have arrived too early. ``end``: length of the answer, once its end has arrived.
    """

    def __init__(self, attempt: int = 0, next_index: int = 0) -> None:
        self._attempt = attempt
        self._early: dict[int, Token] = {}
        self.next_index = next_index
        self.end: int | None = None

    @property
    def is_complete(self) -> bool:
        """True when every token up to the end has been released."""
        return self.end is not None and self.next_index >= self.end

    def continue_as(self, attempt: int) -> None:
        """Take the following tokens from another attempt."""
        self._attempt = attempt
        self._early.clear()

    def accept(self, attempt: int, tokens: list[Token]) -> list[Token]:
        """Take consecutive tokens of an attempt. Return those that are due now, in order."""
        if attempt != self._attempt:
            return []
        # Nearly always, so without a dictionary.
        if tokens and tokens[0].index == self.next_index and not self._early:
            self.next_index += len(tokens)
            return tokens
        for token in tokens:
            if token.index >= self.next_index:
                self._early.setdefault(token.index, token)
        due = []
        while token_now := self._early.pop(self.next_index, None):
            due.append(token_now)
            self.next_index += 1
        return due


def _drop(_batch: TokenBatch) -> None:
    pass


class AttemptOutput:
    """Owns the tokens that have arrived too early, those that the client has not read, and the end of the answer.

    num_delivered: tokens that earlier attempts have delivered. unread: counts what the client has not read, of which this
    answer may hold max_bytes. note: is called with each batch when it is due. It belongs to one attempt (``belong_to``),
    and if the answer is moved to another worker, to the one that continues it.
    """

    def __init__(
        self, num_delivered: int, unread: UnreadAccount, max_bytes: int, note: Callable[[TokenBatch], None]
    ) -> None:
        self._delivery = Delivery(next_index=num_delivered)
        self._inbox: Inbox[TokenBatch] = Inbox(unread, max_bytes)
        self._note = note
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
        self._note(batch)
        if not self._inbox.offer(batch):
            self._inbox.put(batch, sum(map(size_of, entries)))

    def fail(self, error: KvbatonError) -> None:
        """Raise ``error`` at the client behind the tokens that it has not read."""
        self._inbox.put(error)

    def next(self, consume: Consume[TokenBatch] | None) -> Coroutine[Any, Any, TokenBatch]:
        """Return the next tokens that ``consume`` leaves. Raises the error with which the attempt has failed."""
        return self._inbox.get(consume)

    def close(self) -> None:
        """Drop what the client has not read."""
        self._inbox.close()
        self._note = _drop  # a cycle of references would wait for the search for garbage
