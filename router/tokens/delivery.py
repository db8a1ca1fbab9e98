"""The tokens of one choice, in order and each once, in whichever order they arrive."""

from collections.abc import Sequence

import msgspec

from contract.outputs import EngineOutput, FinishReason, TokenLogprobs


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

    def accept(self, attempt: int, tokens: Sequence[Token]) -> list[Token]:
        """Take consecutive tokens of an attempt. Return those that are due now, in order."""
        if attempt != self._attempt:
            return []
        if tokens and tokens[0].index == self.next_index and not self._early:
            self.next_index += len(tokens)
            return list(tokens)
        for token in tokens:
            if token.index >= self.next_index:
                self._early.setdefault(token.index, token)
        due = []
        while token_now := self._early.pop(self.next_index, None):
            due.append(token_now)
            self.next_index += 1
        return due
